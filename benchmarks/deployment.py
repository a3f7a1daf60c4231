"""Deployments to measure, the models that they serve, and what their metrics say."""

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken

from benchmarks.word_tokenizer import word_tokenizer
from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.cli.demo_model import DemoModelConfig, ensure
from paceline.cli.ports import free_port
from paceline.cli.roles import Settings
from paceline.core import metrics as names
from tests.support.mock_model import EOS_TOKEN_ID, write_mock_model

WORKERS = ("prefill", "decode")
BUSY_STATES = ("mapped", "pinned", "quarantined")
COUNTING_S = 2.5  # two beats


def demo_model() -> Path:
    return ensure(DemoModelConfig())


@contextmanager
def mock_model(vocab_size: int = 4096, **overrides: Any) -> Iterator[Path]:
    """A folder with the mock model; every token of it is a visible word. Prompts are token ids."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        model = write_mock_model(Path(folder) / "mock", vocab_size=vocab_size, **overrides)
        tokenizer = word_tokenizer(vocab_size)
        tokenizer.add_special_tokens([AddedToken(f"Ġw{EOS_TOKEN_ID}", special=True)])
        tokenizer.save(str(model / "tokenizer.json"))
        yield model


@contextmanager
def deployment(
    model: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    routers: int = 1,
    router: Settings | None = None,
    gateway: Settings | None = None,
    worker: Settings | None = None,
    restart: bool = True,
) -> Iterator[Cluster]:
    """All services as processes, ready. `router`, `gateway`, `worker` are settings of these."""
    workers = worker or {}
    settings: Mapping[Any, Settings] = {
        "router": router or {},
        "gateway": gateway or {},
        "prefill": workers,
        "decode": workers,
    }
    spec = ClusterSpec(model, prefill, decode, routers, settings=settings, restart=restart)
    with Cluster(spec) as cluster:
        yield cluster


Samples = dict[str, list[tuple[dict[str, str], float]]]


def scrape(url: object) -> Samples:
    """All samples of a process, by name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum over the samples of `name` that carry these labels; 0 where there are none yet."""
    found = samples.get(name, samples.get(f"{name}_total", []))
    return sum(value for own, value in found if labels.items() <= own.items())


def workers_total(cluster: Cluster, name: str, role: str = "", **labels: str) -> float:
    """Sum over the workers of a role, or over all."""
    urls = [url for process, url in cluster.urls.items() if process.startswith(role or WORKERS)]
    return sum(total(scrape(url), name, **labels) for url in urls)


@dataclass(frozen=True, slots=True)
class Left:
    """What is still held somewhere: nothing of it, when no request is running."""

    pages: int  # neither free nor cached
    slots: int  # requests that workers know
    in_flight: int  # requests that the router counts, as a whole and by worker
    unbalanced: int  # workers whose page states do not add up


NOTHING = Left(0, 0, 0, 0)


def left_in(cluster: Cluster) -> Left:
    routers = [scrape(url) for name, url in cluster.urls.items() if name.startswith("router")]
    counted = (names.ROUTER_IN_FLIGHT, names.ROUTER_QUEUE_LENGTH, names.ROUTER_WORKER_IN_FLIGHT)
    workers = [url for process, url in cluster.urls.items() if process.startswith(WORKERS)]
    scraped = [scrape(url) for url in workers]
    pages = sum(total(found, names.WORKER_PAGES, state=s) for found in scraped for s in BUSY_STATES)
    return Left(
        pages=round(pages),
        slots=round(sum(total(found, names.WORKER_SLOTS) for found in scraped)),
        in_flight=round(sum(total(found, name) for found in routers for name in counted)),
        unbalanced=sum(total(found, names.WORKER_BOOKS_BALANCED) != 1 for found in scraped),
    )


def settle(cluster: Cluster, timeout_s: float = 15.0) -> Left:
    """What is left once everything had time to end. Workers count pages at the beats after that."""
    deadline = time.monotonic() + timeout_s
    while (left := left_in(cluster)).slots or left.in_flight:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    time.sleep(COUNTING_S)
    while (left := left_in(cluster)) != NOTHING and time.monotonic() < deadline:
        time.sleep(0.25)
    return left


@contextmanager
def rebalancing(cluster: Cluster, **settings: object) -> Iterator[int]:
    """`paceline rebalance` beside it; its probe port."""
    port = free_port("127.0.0.1")
    command = [sys.executable, "-P", "-m", "paceline.cli.main", "rebalance"]
    command += [f"--router={cluster.router_endpoints}", f"--probe-port={port}"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    secret = {"PACELINE_REBALANCE_SECRET": cluster.secret}
    process = subprocess.Popen(command, env={**os.environ, **cluster.spec.environment, **secret})
    try:
        yield port
        process.terminate()
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
