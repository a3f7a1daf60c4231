"""The faults of benchmarks.alerts: what each does to a live deployment, and how it is mended."""

import asyncio
import hashlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.deployment import mock_model, rebalancing
from benchmarks.loadgen import Call, send
from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.cli.roles import Settings
from tests.support.certificates import Mount

KEY = "sk-benchmark"
VOCAB_SIZE = 4096
POOL_NAME = "memfd:paceline-kv"
STEADY, FLOOD = 3, 64  # clients
PAUSE_S = 0.2  # of each, between two requests
MONTHS_DAYS = 90
NO_COLLECTOR = "http://127.0.0.1:9"  # costs spans, which are counted


@dataclass(slots=True)
class Deployment:
    """All services under a load that goes on, whatever happens to it."""

    cluster: Cluster
    model: Path
    key_file: Path
    certificates: Mount
    rebalance_port: int
    at_once: int = STEADY
    max_tokens: int = 12
    stopping: threading.Event = field(default_factory=threading.Event)
    chance: random.Random = field(default_factory=lambda: random.Random(5))

    def environment(self) -> dict[str, str]:
        """What the commands of runbooks expect."""
        urls = self.cluster.urls
        names = {"GATEWAY": "gateway", "ROUTER": "router"}
        names |= {"PREFILL": "prefill-0", "DECODE": "decode-0"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {
            **os.environ,
            "PATH": path,
            **{variable: str(urls[name]) for variable, name in names.items()},
            "ROUTER_GRPC": self.cluster.router_endpoint,
            "SECRET": self.cluster.secret,
            "REDIS_URL": self.cluster.redis_url,
            **self.certificates.environment,
        }

    def rank(self, worker: str) -> psutil.Process:
        """The process that computes."""
        front = psutil.Process(self.cluster.processes[worker].pid)
        return next(child for child in front.children() if pool_maps(child.pid))

    async def load(self) -> None:
        """`at_once` clients, each with one request after the other."""
        await asyncio.gather(*(self._client(number) for number in range(FLOOD)))

    async def _client(self, number: int) -> None:
        while not self.stopping.is_set():
            if number < self.at_once:
                await send(self.cluster.base_url, self.call())
            await asyncio.sleep(PAUSE_S)

    def call(self) -> Call:
        """The beginning of a prompt is one of four, so that there are hits."""
        step = 1 + self.chance.randrange(4)
        beginning = [300 + step * i for i in range(96)]
        prompt = beginning + [self.chance.randrange(300, VOCAB_SIZE) for _ in range(64)]
        body = {"model": self.model.name, "prompt": prompt, "max_tokens": self.max_tokens}
        headers = {"authorization": f"Bearer {KEY}"}
        return Call({**body, "ignore_eos": True, "stream": True}, headers=headers, timeout_s=40)


@contextmanager
def deployed(folder: Path, routers: int = 1) -> Iterator[Deployment]:
    """One prefill and one decode worker with little memory, which are restarted when they die."""
    key_file = folder / "keys.toml"
    key_file.write_text(keys())
    certificates = Mount(folder / "tls")
    certificates.issue(days=MONTHS_DAYS)
    tiers = folder / "tiers.yaml"
    tiers.write_text("- kind: host\n  capacity_mib: 4\n")
    worker = {
        "num_threads": 1,
        "pool_mib": 2,
        "tiers": tiers,
        "transports": "tcp",
    }
    settings: dict[str, Settings] = {
        "router": {"split_min_tokens": 0, "worker_wait_s": 1, "queue_limit": FLOOD // 2},
        "gateway": {"api_keys": key_file, "otlp_endpoint": NO_COLLECTOR},
        "prefill": worker,
        "decode": worker,
    }
    with (
        mock_model(vocab_size=VOCAB_SIZE, step_s=0.02) as model,
        Cluster(
            ClusterSpec(
                model, routers=routers, settings=settings, environment=certificates.environment
            )
        ) as cluster,
        rebalancing(cluster) as rebalance_port,
    ):
        deployment = Deployment(cluster, model, key_file, certificates, rebalance_port)
        loader = threading.Thread(target=asyncio.run, args=(deployment.load(),))
        loader.start()
        try:
            yield deployment
        finally:
            deployment.stopping.set()
            loader.join()


def keys() -> str:
    return f'[tenants.benchmark]\nkeys = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]\n'


def nothing(deployment: Deployment) -> None:
    pass


Act = Callable[[Deployment], object]


@dataclass(frozen=True, slots=True)
class Fault:
    text: str
    alerts: tuple[str, ...]
    inject: Act
    mend: Act = nothing
    go_on: Act = nothing  # again and again until the alerts fire


def break_key_file(deployment: Deployment) -> None:
    deployment.key_file.write_text("[tenants.benchmark]\nkeys = 3\n")


def mend_key_file(deployment: Deployment) -> None:
    deployment.key_file.write_text(keys())


def issue_for_a_day(deployment: Deployment) -> None:
    deployment.certificates.issue(days=1)


def issue_for_months(deployment: Deployment) -> None:
    deployment.certificates.issue(days=MONTHS_DAYS)


def break_model(worker: str) -> Act:
    """The rank dies and cannot load the model again."""

    def act(deployment: Deployment) -> None:
        config = deployment.model / "config.json"
        config.rename(config.with_suffix(".away"))
        deployment.rank(worker).kill()

    return act


def mend_model(deployment: Deployment) -> None:
    config = deployment.model / "config.json"
    config.with_suffix(".away").rename(config)
    deployment.cluster.wait_connected(2, 60)


def kill_rank(worker: str) -> Act:
    def act(deployment: Deployment) -> None:
        for _ in range(2):
            deployment.rank(worker).kill()
            time.sleep(1)
            deployment.cluster.wait_connected(2, 60)

    return act


def corrupt_pool(deployment: Deployment) -> None:
    """Overwrites what the prefill worker holds, behind its back."""
    pid = deployment.rank("prefill-0").pid
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for start, end in pool_maps(pid):
            memory.seek(start)
            memory.write(os.urandom(end - start))


def end_quarantine(deployment: Deployment) -> None:
    """Readers leave the worker alone for minutes; its next incarnation they do not know."""
    deployment.rank("prefill-0").kill()
    time.sleep(1)
    deployment.cluster.wait_connected(2, 60)


def pool_maps(pid: int) -> list[tuple[int, int]]:
    """Addresses at which a process has mapped a page pool to write."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    pools = [line.split() for line in lines if POOL_NAME in line and " rw" in line]
    return [(int(a, 16), int(b, 16)) for a, b in (parts[0].split("-") for parts in pools)]


def flood(deployment: Deployment) -> None:
    deployment.at_once, deployment.max_tokens = FLOOD, 240


def ebb(deployment: Deployment) -> None:
    deployment.at_once, deployment.max_tokens = STEADY, 12


def signal_to(process: str, number: signal.Signals) -> Act:
    return lambda deployment: deployment.cluster.kill(process, number)


FAULTS = (
    Fault("a wrong file of API keys", ("PacelineKeyFileWrong",), break_key_file, mend_key_file),
    Fault(
        "a certificate for one more day",
        ("PacelineCertificateExpires",),
        issue_for_a_day,
        issue_for_months,
    ),
    Fault(
        "Redis is stopped",
        ("PacelineRedisDown",),
        signal_to("redis", signal.SIGSTOP),
        signal_to("redis", signal.SIGCONT),
    ),
    Fault(
        "the prefill worker's pool is overwritten",
        ("PacelineKvMismatch", "PacelineHandoffsFail"),
        nothing,
        end_quarantine,
        go_on=corrupt_pool,
    ),
    Fault(
        "the prefill worker's rank dies and its model cannot be loaded",
        ("PacelineNoPrefillWorker",),
        break_model("prefill-0"),
        mend_model,
    ),
    Fault(
        "the decode worker's rank dies and its model cannot be loaded",
        (
            *("PacelineNoDecodeWorker", "PacelineWorkersLost", "PacelineWorkerNotReady"),
            "PacelineRequestsFail",
        ),
        break_model("decode-0"),
        mend_model,
    ),
    Fault("the decode worker's rank dies twice", ("PacelineRankRestarts",), kill_rank("decode-0")),
    Fault(
        "more requests than the pool holds",
        ("PacelineSaturated", "PacelineSlowFirstToken", "PacelineKvPoolFull"),
        flood,
        ebb,
    ),
)
