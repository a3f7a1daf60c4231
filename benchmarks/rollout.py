"""Rolls every role of a rendered chart under load and counts the requests that suffer.

Pods run as processes in network namespaces of their own, as their manifests say: command,
environment, mounts, user, read-only root, probes, preStop, grace period (benchmarks.kubelet).
Requests go through the gateway's Service. Needs root, iproute2 and util-linux; nothing outside is
touched.

The load is 20 requests a second with streams of 60 s, on a clock ten times as fast, as are the
chart's times of drain: a worker that goes cannot finish what has just begun. preStop of
gateways and routers takes as long as ever, so one stream of twenty takes three times as long as the
others: it runs at SIGTERM. --quick is a tenth of that, and shorter streams.
"""

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import chart_objects
from benchmarks.answer import Answer
from benchmarks.chart_objects import NAMESPACE, RELEASE, Object, Values
from benchmarks.common import Figures, Options, publish, show
from benchmarks.deployment import mock_model
from benchmarks.kubelet import Deployment, Node, Pod, ServiceProxy, in_own_network
from benchmarks.loadgen import Call, send
from paceline.cli.redis_server import binary

ORDER = ("prefill", "decode", "gateway", "router", "rack")
SPEEDUP = 10  # of the report's 60 s and the chart's times of drain
DRAIN_S = {"gateway": 600, "router": 60, "workers": 60}  # the chart's
PROMPT_TOKENS = 64  # enough to be split
NUM_PROMPTS = 8
READY_TIMEOUT_S = 90.0
LAG_PERIOD_S = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    per_second: float
    max_tokens: int
    step_s: float = 0.02
    longer: int = 1  # times so many tokens has one stream of LONG_EVERY


LONG_EVERY = 20
FULL, QUICK = Load(20, 60, step_s=1 / SPEEDUP, longer=3), Load(2, 60)


@dataclass
class Count:
    """Of the requests of one rollout."""

    requests: int = 0
    failed: int = 0
    truncated: int = 0
    differing: int = 0
    reasons: set[str] = field(default_factory=set)

    def add(self, answer: Answer, expected: list[int]) -> None:
        self.requests += 1
        tokens = answer.token_ids()
        if answer.status != 200:
            self.failed += 1
            self.reasons.add(f"{answer.status} {answer.error}"[:200])
        elif not answer.is_complete or len(tokens) < len(expected):
            self.truncated += 1
            self.reasons.add(f"{len(tokens)} of {len(expected)} tokens: {answer.error}"[:200])
        elif tokens != expected:
            self.differing += 1


def values(model: Path) -> Values:
    drain_s = {name: seconds // SPEEDUP for name, seconds in DRAIN_S.items()}
    return {
        "model": {
            "name": model.name,
            "path": f"/models/{model.name}",
            "volume": {"hostPath": {"path": str(model.parent), "type": "Directory"}},
        },
        "gateway": {"memoryMib": 512, "drainSeconds": drain_s["gateway"]},
        "router": {"memoryMib": 512, "drainSeconds": drain_s["router"]},
        "workers": {
            "cpu": "1",
            "memoryMib": 512,
            "poolMib": 64,
            "shmMib": 64,
            "loadSeconds": int(READY_TIMEOUT_S),
            "drainSeconds": drain_s["workers"],
        },
        "pools": {"rack": {"role": "group"}},  # a decode worker and a prefill worker, as one
    }


class Cluster:
    """The chart's Deployments, LeaderWorkerSets and Services, running."""

    def __init__(self, objects: list[Object], folder: Path) -> None:
        services = [item for item in objects if item["kind"] == "Service"]
        addresses = {s["metadata"]["name"]: f"198.18.2.{i}" for i, s in enumerate(services, 1)}
        image = "valkey/valkey:8.1"
        self._node = Node(folder, objects, addresses, {image: [str(binary())]})
        self.deployments = {
            item["metadata"]["name"].removeprefix(f"{RELEASE}-"): Deployment(self._node, item)
            for item in objects
            if item["kind"] in ("Deployment", "LeaderWorkerSet")
        }
        self._proxies = [
            ServiceProxy(service, addresses[service["metadata"]["name"]], self.pods)
            for service in services
        ]
        self.url = f"http://{addresses[f'{RELEASE}-gateway']}:8000"

    def pods(self) -> list[Pod]:
        return [pod for deployment in self.deployments.values() for pod in deployment.pods]

    async def start(self) -> None:
        for proxy in self._proxies:
            await proxy.start()
        async with asyncio.timeout(READY_TIMEOUT_S):
            await asyncio.gather(*(one.start() for one in self.deployments.values()))

    async def stop(self) -> None:
        await asyncio.gather(*(one.stop() for one in self.deployments.values()))


class Traffic:
    """Streams at a steady rate, each of which must bring what it brought when nothing rolled."""

    def __init__(self, url: str, model: str, load: Load) -> None:
        self._url, self._load = url, load
        lengths = [load.max_tokens] * NUM_PROMPTS + [load.longer * load.max_tokens]
        self._calls = [self._call(model, salt, length) for salt, length in enumerate(lengths)]
        self._expected: list[list[int]] = []

    def _call(self, model: str, salt: int, max_tokens: int) -> Call:
        prompt = [300 + (salt * 7919 + i * i * 31) % 3000 for i in range(PROMPT_TOKENS)]
        fields = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        timing = {"x-paceline-timing": "1"}
        body = {"model": model, "prompt": prompt, "stream": True, **fields}
        return Call(body, headers=timing, timeout_s=60)

    async def learn(self) -> None:
        """What the answers are. Raises RuntimeError when one is not whole."""
        for answer in await asyncio.gather(*(send(self._url, call) for call in self._calls)):
            if not answer.is_complete:
                raise RuntimeError(f"nothing rolls, but: {answer.status} {answer.error}")
            self._expected.append(answer.token_ids())

    async def during(self, work: asyncio.Task[None]) -> Count:
        """Sends until `work` is done, then waits for the answers."""
        sent: list[tuple[int, asyncio.Task[Answer]]] = []
        while not work.done() or len(sent) < NUM_PROMPTS:
            is_long = len(sent) % LONG_EVERY == 0
            i = NUM_PROMPTS if is_long else len(sent) % NUM_PROMPTS
            sent.append((i, asyncio.create_task(send(self._url, self._calls[i]))))
            await asyncio.sleep(1 / self._load.per_second)
        await work
        count = Count()
        for i, answer in sent:
            count.add(await answer, self._expected[i])
        return count


class Lag:
    """How long this process, through which all connections pass, was held up at most."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def watch(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(LAG_PERIOD_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - began - LAG_PERIOD_S)


async def roll_all(cluster: Cluster, traffic: Traffic) -> dict[str, Count]:
    counts = {}
    for name in ORDER:
        deployment = cluster.deployments[name]
        counts[name] = await traffic.during(asyncio.create_task(deployment.roll()))
        count = counts[name]
        show(f"{name}: {count.requests} requests, {count.failed} failed {sorted(count.reasons)}")
    return counts


async def measured(options: Options) -> Figures:
    load = QUICK if options.quick else FULL
    with mock_model(step_s=load.step_s) as model, tempfile.TemporaryDirectory() as folder:
        model.parent.chmod(0o755)  # for the containers' user
        objects = chart_objects.render(values(model))
        cluster = Cluster(objects, Path(folder))
        started = time.perf_counter()
        lag = Lag()
        try:
            await cluster.start()
            watching = asyncio.create_task(lag.watch())
            show(f"ready in {NAMESPACE} after {time.perf_counter() - started:.0f} s")
            traffic = Traffic(cluster.url, model.name, load)
            await traffic.learn()
            counts = await roll_all(cluster, traffic)
            watching.cancel()
            await cluster.stop()
        except BaseException:
            show_logs(Path(folder))
            raise
    return {**figures(cluster, counts), "longest_stall_s": lag.longest_s}


def figures(cluster: Cluster, counts: dict[str, Count]) -> Figures:
    deployments = [cluster.deployments[name] for name in ORDER]
    ended = [pod for deployment in deployments for pod in deployment.ended]
    exits = [code for deployment in deployments for code in deployment.exits]
    every = counts.values()
    return {
        "failed": sum(count.failed for count in every),
        **{f"failed_{name}": counts[name].failed for name in ORDER},
        "truncated": sum(count.truncated for count in every),
        "differing": sum(count.differing for count in every),
        "requests": sum(count.requests for count in every),
        "not_seen_unready": sum(not pod.was_unready for pod in ended),
        "exits_not_0": sum(code != 0 for code in exits),
        "restarts": sum(pod.restarts for pod in ended),
        "pods": len(ended),
    }


def show_logs(folder: Path) -> None:
    for log in sorted(folder.glob("*/*.log")):
        show(f"--- {log.parent.name}\n{log.read_text()[-1500:]}")


def measure(options: Options) -> Figures:
    return asyncio.run(measured(options))


def main() -> int:
    in_own_network()
    return publish("rollout", measure)


if __name__ == "__main__":
    sys.exit(main())
