"""`paceline top`: workers, queues, rates and links of a deployment, live, from its metrics."""

import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import ClassVar
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from paceline.cli.top_table import ProcessTable, Row, empty_table
from paceline.core import metrics as names
from paceline.core.config import setting
from paceline.core.errors import ConfigError

MAX_URLS = 256
MAX_BYTES = 8 << 20  # of one answer
TIMEOUT_S = 2.0
WORKER_SERVICES = ("prefill", "decode")

Samples = dict[str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True, slots=True)
class TopConfig:
    """Show workers, queues, rates and links of a deployment until Ctrl-C."""

    env_prefix: ClassVar[str] = "PACELINE_TOP_"

    urls: tuple[str, ...] = setting(
        ("http://127.0.0.1:8000", "http://127.0.0.1:9101"),
        "Where processes show /metrics, http://host:port each; `paceline up` prints them.",
    )
    interval_s: float = setting(2.0, "Time between two looks; rates are over it.")
    looks: int = setting(0, "How often to look before it ends; 0: until Ctrl-C.")

    def __post_init__(self) -> None:
        fits = 1 <= len(self.urls) <= MAX_URLS
        reason = f"name 1 to {MAX_URLS} addresses, split by commas"
        ConfigError.check("urls", ",".join(self.urls), fits, reason)
        for url in self.urls:
            ConfigError.check("urls", url, is_http(url), "must be of the form http://host:port")
        fits = 0.1 <= self.interval_s <= 3600
        ConfigError.check("interval_s", self.interval_s, fits, "must lie between 0.1 and 3600")
        ConfigError.check("looks", self.looks, self.looks >= 0, "must not be negative")


def is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are none
        return False


@dataclass(frozen=True, slots=True)
class Look:
    """What one process showed at one moment; nothing if it did not answer."""

    url: str
    at_s: float
    samples: Samples

    @property
    def service(self) -> str:
        """gateway, router, prefill or decode; empty: it did not answer."""
        found = self.samples.get(names.SERVICE_INFO, [])
        return found[0][0].get("service", "") if found else ""

    @property
    def role(self) -> str:
        """Of a worker the one that it has now, which may be another than its service."""
        found = self.samples.get(names.WORKER_ROLE, [])
        return next((labels.get("role", "") for labels, value in found if value), self.service)

    def total(self, name: str) -> float:
        """Sum over the labels of a series."""
        return sum(value for _, value in self.samples.get(name, []))


@dataclass(frozen=True, slots=True)
class Process:
    """A process now, and a look ago."""

    now: Look
    before: Look

    def gauge(self, name: str) -> str:
        return f"{self.now.total(name):.0f}"

    def share(self, name: str) -> str:
        return f"{self.now.total(name):.0%}"

    def rate(self, name: str) -> float:
        """Of a counter, a second. 0 over a restart, and where there is nothing to compare with."""
        seconds = self.now.at_s - self.before.at_s
        risen = self.now.total(name) - self.before.total(name)
        return max(0.0, risen) / seconds if seconds > 0 and self.before.samples else 0.0

    def mean_ms(self, histogram: str) -> str:
        """Of what a histogram saw since the last look."""
        count = self.rate(f"{histogram}_count")
        return f"{1000 * self.rate(f'{histogram}_sum') / count:.1f}" if count else "–"


def run(config: TopConfig) -> int:
    """Looks again and again. On a terminal one picture is kept up to date, else each is printed."""
    console = Console()
    if not console.is_terminal:
        watch(config, console.print)
        return 0
    with Live(console=console, auto_refresh=False) as live:
        watch(config, lambda drawn: live.update(drawn, refresh=True))
    return 0


def watch(config: TopConfig, show: Callable[[Group], object]) -> None:
    with ThreadPoolExecutor(min(32, len(config.urls)), "look") as threads:
        before = list(threads.map(look, config.urls))
        for _ in looks(config):
            time.sleep(config.interval_s)
            now = list(threads.map(look, config.urls))
            show(picture([Process(*pair) for pair in zip(now, before, strict=True)]))
            before = now


def looks(config: TopConfig) -> Iterator[int]:
    number = 0
    while not config.looks or number < config.looks:
        yield number
        number += 1


def look(url: str) -> Look:
    try:
        base = url.rstrip("/").removesuffix("/metrics")  # as `paceline up` prints it, or without
        with urllib.request.urlopen(f"{base}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read(MAX_BYTES).decode()
        families = list(text_string_to_metric_families(text))
    except (OSError, ValueError, HTTPException):  # nobody there, or no metrics
        return Look(url, time.monotonic(), {})
    samples: Samples = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return Look(url, time.monotonic(), samples)


Column = tuple[str, Callable[[Process], str]]

GATEWAY: tuple[Column, ...] = (
    ("running", lambda p: p.gauge(names.GATEWAY_RUNNING)),
    ("ended/s", lambda p: f"{p.rate(names.REQUEST_SUCCESS):.1f}"),
    ("errors/s", lambda p: f"{p.rate(names.GATEWAY_ERRORS):.1f}"),
    ("prompt tok/s", lambda p: f"{p.rate(names.PROMPT_TOKENS):.0f}"),
    ("cached tok/s", lambda p: f"{p.rate(names.PROMPT_TOKENS_CACHED):.0f}"),
    ("TTFT ms", lambda p: p.mean_ms(names.TTFT)),
    ("ITL ms", lambda p: p.mean_ms(names.INTER_TOKEN_LATENCY)),
)
ROUTER: tuple[Column, ...] = (
    ("queue", lambda p: p.gauge(names.ROUTER_QUEUE_LENGTH)),
    ("in flight", lambda p: p.gauge(names.ROUTER_IN_FLIGHT)),
    ("workers", lambda p: p.gauge(names.ROUTER_WORKER_UP)),
    ("plans/s", lambda p: f"{p.rate(names.ROUTER_PLANS):.1f}"),
    ("failed/s", lambda p: f"{p.rate(names.ROUTER_REPLANS):.1f}"),
    ("index keys", lambda p: p.gauge(names.ROUTER_INDEX_KEYS)),
    ("redis", lambda p: "up" if p.now.total(names.ROUTER_REDIS_UP) else "down"),
)
WORKER: tuple[Column, ...] = (
    ("ready", lambda p: "yes" if p.now.total(names.WORKER_READY) else "no"),
    ("in batch", lambda p: p.gauge(names.VLLM_RUNNING)),
    ("waiting", lambda p: p.gauge(names.VLLM_WAITING)),
    ("KV", lambda p: p.share(names.VLLM_KV_USAGE)),
    ("tok/s", lambda p: f"{p.rate(names.WORKER_GENERATED):.0f}"),
    ("pulled MB/s", lambda p: f"{p.rate(names.TRANSFER_BYTES) / 1e6:.1f}"),
    ("leases", lambda p: p.gauge(names.LEASES_ACTIVE)),
    ("ranks", lambda p: p.gauge(names.WORKER_INCARNATIONS)),
)


def picture(processes: list[Process]) -> Group:
    tables: list[ProcessTable | Table] = [
        table("gateways", GATEWAY, [p for p in processes if p.now.service == "gateway"]),
        table("routers", ROUTER, [p for p in processes if p.now.service == "router"]),
        table("workers", WORKER, [p for p in processes if p.now.service in WORKER_SERVICES]),
        links(processes),
        silent([p for p in processes if not p.now.service]),
    ]
    return Group(*[one for one in tables if one.row_count])


def table(title: str, columns: tuple[Column, ...], processes: list[Process]) -> ProcessTable:
    rows = [
        Row(
            process.now.role,
            urlsplit(process.now.url).netloc,
            [of(process) for _, of in columns],
        )
        for process in processes
    ]
    return ProcessTable(title, tuple(name for name, _ in columns), rows)


def links(processes: list[Process]) -> Table:
    """Who reads from whom, as fast as the reader estimates."""
    made = empty_table("links")
    for name in ("from", "to", "over"):
        made.add_column(name, overflow="fold")
    made.add_column("GB/s", justify="right")
    for link in speeds(processes):
        made.add_row(*link)
    return made


def silent(processes: list[Process]) -> Table:
    made = empty_table("no answer")
    made.show_header = False
    made.add_column(overflow="fold")
    for process in processes:
        made.add_row(urlsplit(process.now.url).netloc)
    return made


def speeds(processes: list[Process]) -> Iterator[tuple[str, str, str, str]]:
    """Source, reader, transport, GB/s of what was pulled."""
    for process in processes:
        reader = urlsplit(process.now.url).netloc
        measured = process.now.samples.get(names.TRANSFER_LINK_SPEED, [])
        for labels, _ in process.now.samples.get(names.LINKS_DEGRADED, []):
            seen = [f"{speed / 1e9:.2f}" for of, speed in measured if of == labels]
            yield labels["source"], reader, labels["transport"], seen[0] if seen else "–"
