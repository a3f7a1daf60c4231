"""Deployments to measure, the models that they serve, and what their metrics say."""

import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, Tokenizer, decoders, models

from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.cli.demo_model import DemoModelConfig, ensure
from paceline.cli.roles import Settings
from paceline.core import metrics as names
from tests.support.mock_model import EOS_TOKEN_ID, write_mock_model

WORKERS = ("prefill", "decode")
BUSY_STATES = ("mapped", "pinned", "quarantined")


def demo_model() -> Path:
    return ensure(DemoModelConfig())


@contextmanager
def mock_model(vocab_size: int = 4096, **overrides: Any) -> Iterator[Path]:
    """A folder with the mock model; every token of it is a visible word. Prompts are token ids."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        model = write_mock_model(Path(folder) / "mock", vocab_size=vocab_size, **overrides)
        tokenizer = Tokenizer(models.BPE({f"Ġw{i}": i for i in range(vocab_size)}, []))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(f"Ġw{EOS_TOKEN_ID}", special=True)])
        tokenizer.save(str(model / "tokenizer.json"))
        yield model


@contextmanager
def deployment(
    model: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    router: Settings | None = None,
    worker: Settings | None = None,
    restart: bool = True,
) -> Iterator[Cluster]:
    """All services as processes, ready. `router` and `worker` are settings of those services."""
    workers = worker or {}
    settings: Mapping[Any, Settings] = {
        "router": router or {},
        "prefill": workers,
        "decode": workers,
    }
    spec = ClusterSpec(model, prefill, decode, settings=settings, restart=restart)
    with Cluster(spec) as cluster:
        wait_for_workers(cluster, prefill + decode)
        yield cluster


def wait_for_workers(cluster: Cluster, num_workers: int, timeout_s: float = 30.0) -> None:
    """Returns when the router is connected to so many."""
    deadline = time.monotonic() + timeout_s
    while total(scrape(cluster.urls["router"]), names.ROUTER_WORKER_UP) < num_workers:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the router does not see {num_workers} workers")
        time.sleep(0.05)


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
    """Sum over the samples of `name` that carry these labels."""
    return sum(v for found, v in samples.get(name, []) if labels.items() <= found.items())


def workers_total(cluster: Cluster, name: str, role: str = "", **labels: str) -> float:
    """Sum over the workers of a role, or over all."""
    urls = [url for process, url in cluster.urls.items() if process.startswith(role or WORKERS)]
    return sum(total(scrape(url), name, **labels) for url in urls)


def held_pages(cluster: Cluster) -> int:
    """Pages that something holds: neither free nor cached."""
    return round(sum(workers_total(cluster, names.WORKER_PAGES, state=s) for s in BUSY_STATES))


def in_flight(cluster: Cluster) -> int:
    """Requests that the router still counts, as a whole and by worker."""
    samples = scrape(cluster.urls["router"])
    counted = (names.ROUTER_IN_FLIGHT, names.ROUTER_QUEUE_LENGTH, names.ROUTER_WORKER_IN_FLIGHT)
    return round(sum(total(samples, name) for name in counted))


async def settle(cluster: Cluster, timeout_s: float = 12.0) -> tuple[int, int]:
    """(held pages, requests in flight) once both are zero, or when time is up."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        left = await asyncio.to_thread(lambda: (held_pages(cluster), in_flight(cluster)))
        if not any(left) or asyncio.get_running_loop().time() > deadline:
            return left
        await asyncio.sleep(0.25)


def model_context(model: Path) -> dict[str, Any]:
    """The model's config.json."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config
