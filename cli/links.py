"""`paceline links`: who reads KV from whom, over what, how fast, and what is wrong with it."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table

from paceline.cli.top import MAX_URLS, WORKER_SERVICES, Look, is_http, look
from paceline.core import metrics as names
from paceline.core.config import setting
from paceline.core.errors import ConfigError, Unavailable

EXIT_OK, EXIT_DEGRADED = 0, 3


@dataclass(frozen=True, slots=True)
class LinksConfig:
    """Show the links between workers once; ends with 3 if one is not as it should be."""

    env_prefix: ClassVar[str] = "PACELINE_LINKS_"

    urls: tuple[str, ...] = setting(
        (), "Where workers show /metrics, http://host:port each; `paceline up` prints them."
    )

    def __post_init__(self) -> None:
        fits = 1 <= len(self.urls) <= MAX_URLS
        reason = f"name 1 to {MAX_URLS} addresses, split by commas"
        ConfigError.check("urls", ",".join(self.urls), fits, reason)
        for url in self.urls:
            ConfigError.check("urls", url, is_http(url), "must be of the form http://host:port")


@dataclass(frozen=True, slots=True)
class LinkLine:
    """A link as its reader sees it; figures are NaN until there are some."""

    source: str
    reader: str
    transport: str
    now: float  # bytes a second, as the reader estimates
    tested: float
    latency_s: float
    is_degraded: bool

    def cells(self) -> tuple[str, ...]:
        state = "degraded" if self.is_degraded else "ok"
        speeds = (_shown(self.now / 1e9), _shown(self.tested / 1e9), _shown(self.latency_s * 1e6))
        return (self.source, self.reader, self.transport, *speeds, state)


def run(config: LinksConfig) -> int:
    """Raises Unavailable if no worker answers."""
    with ThreadPoolExecutor(min(32, len(config.urls)), "look") as threads:
        looks = list(threads.map(look, config.urls))
    workers = [one for one in looks if one.service in WORKER_SERVICES]
    if not workers:
        raise Unavailable("no worker shows its metrics there")
    lines = sorted((line for one in workers for line in lines_of(one)), key=LinkLine.cells)
    Console().print(table(lines))
    notes = [note for one in workers for note in notes_of(one)]
    for note in notes:
        print(note)
    is_degraded = any(line.is_degraded for line in lines) or bool(notes)
    return EXIT_DEGRADED if is_degraded else EXIT_OK


def lines_of(worker: Look) -> Iterator[LinkLine]:
    now, tested, latency = (
        {(labels["source"], labels["transport"]): value for labels, value in found}
        for found in (
            worker.samples.get(name, [])
            for name in (names.TRANSFER_LINK_SPEED, names.LINK_TEST_SPEED, names.LINK_TEST_LATENCY)
        )
    )
    for labels, degraded in worker.samples.get(names.LINKS_DEGRADED, []):
        key = labels["source"], labels["transport"]
        yield LinkLine(
            source=key[0],
            reader=urlsplit(worker.url).netloc,
            transport=key[1],
            now=now.get(key, math.nan),
            tested=tested.get(key, math.nan),
            latency_s=latency.get(key, math.nan),
            is_degraded=bool(degraded),
        )


def notes_of(worker: Look) -> Iterator[str]:
    """Of sources that it reads nothing from, and has no link to."""
    for name, what in ((names.PEERS_APART, "apart"), (names.PEERS_QUARANTINED, "in quarantine")):
        if number := int(worker.total(name)):
            yield f"{urlsplit(worker.url).netloc} keeps {number} {what}: see its /readyz"


def table(lines: list[LinkLine]) -> Table:
    made = Table("from", "to", "over", box=None)
    for name in ("GB/s", "self-test GB/s", "µs"):
        made.add_column(name, justify="right")
    made.add_column("state")
    for line in lines:
        made.add_row(*line.cells())
    return made


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}" if value < 10 else f"{value:.0f}"
