"""`paceline bench`: what a live deployment makes of a load that `paceline sim` replays, too."""

import asyncio
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

from paceline.core.config import check_positive, setting
from paceline.core.errors import ConfigError, shown
from paceline.sim.http_stream import Server
from paceline.sim.live import Answered, Target, drive, find_target
from paceline.sim.load import Sessions, arrivals_of, check_load
from paceline.sim.prompts import Prompts
from paceline.sim.slo import Slo
from paceline.sim.trace import BLOCK_TOKENS, Arrival

_check = ConfigError.check
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Send a load to a live deployment; docs/simulation.md."""

    env_prefix: ClassVar[str] = "PACELINE_BENCH_"

    url: str = setting("http://127.0.0.1:8000", "Of a gateway, or a server with the same API.")
    model: str = setting("", "Name of the model; none: the only one that is served.")
    api_key_file: str = setting("", "File with the API key, if the server wants one.")
    trace: str = setting("", "File in the Mooncake format, .xz or plain.")
    requests: int = setting(2000, "How many requests of the load, from the first on.")
    time_scale: float = setting(1.0, "How many times as fast as the load says requests come.")
    shrink: int = setting(
        1, "Divides all lengths, for a small model: a power of two. Shared prefixes stay shared."
    )
    vocab_size: int = setting(256, "Token ids of prompts lie below; at most the model's.")
    concurrency_limit: int = setting(
        512, "Connections at most. Who waits for one is late, and its TTFT counts that, too."
    )
    timeout_s: float = setting(600.0, "Until a request without its last token counts as failed.")
    seed: int = setting(0, "Of all chance: the same seed makes the same prompts.")
    json: bool = setting(False, "Print one line of JSON, not a table.")
    slo: Slo = Slo()
    synthetic: Sessions = Sessions()

    def __post_init__(self) -> None:
        check_load(self.trace, self.synthetic)
        _check("url", self.url, is_http(self.url), "must be of the form http://host:port")
        check_positive(self, "requests", "time_scale", "concurrency_limit", "timeout_s")
        fits = self.shrink > 0 and BLOCK_TOKENS % self.shrink == 0
        _check("shrink", self.shrink, fits, f"must be a power of two, at most {BLOCK_TOKENS}")
        _check("vocab_size", self.vocab_size, self.vocab_size > 1, "must be at least 2")
        _check("seed", self.seed, self.seed >= 0, "must not be negative")


def is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@dataclass(slots=True)
class Run:
    """What is known so far; it grows while requests are sent."""

    num_skipped: int = 0
    answers: list[Answered] = field(default_factory=list)
    span_s: float = 0.0


def run(config: BenchConfig) -> int:
    """1 when no request was answered; 130 after Ctrl-C, which shows what there is so far."""
    found, is_interrupted = Run(), False
    signal.signal(signal.SIGINT, signal.default_int_handler)  # scripts start jobs without
    try:
        asyncio.run(measure(config, found))
    except KeyboardInterrupt:
        is_interrupted = True
    if told := next((one for one in found.answers if one.message), None):
        text = shown(told.message, 300)
        print(f"paceline: the first failure: {told.failure}: {text}", file=sys.stderr)
    figures = figures_of(found, config.slo)
    if config.json:
        print(orjson.dumps(figures).decode())
    else:
        Console().print(table_of(figures))
    if is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if any(not answered.failure for answered in found.answers) else EXIT_FAILED


async def measure(config: BenchConfig, found: Run) -> None:
    """Raises ConfigError when the server cannot be reached, lets us in or has the model not."""
    prompts = Prompts(config.vocab_size, config.shrink, config.seed)
    arrivals = arrivals_of(config.trace, config.synthetic, config.requests, config.seed)
    target = await find_target(
        server_of(config), config.model, config.timeout_s, config.api_key_file
    )
    shrunk = [prompts.shrunk(arrival) for arrival in arrivals]
    load = [arrival for arrival in shrunk if fits(arrival, target)]
    found.num_skipped = len(shrunk) - len(load)
    if found.num_skipped:
        longest = max(one.num_prompt_tokens + one.num_output_tokens for one in shrunk)
        print(
            f"paceline: {found.num_skipped} of {len(shrunk)} requests skipped: {target.model} takes"
            f" {target.max_model_len} tokens, the longest has {longest}; --shrink makes it smaller",
            file=sys.stderr,
        )
    began_s = time.perf_counter()
    watching = asyncio.create_task(watch(found, len(load)))
    try:
        await drive(
            target,
            prompts,
            load,
            config.slo,
            time_scale=config.time_scale,
            max_connections=config.concurrency_limit,
            answers=found.answers,
        )
    finally:
        watching.cancel()
        found.span_s = time.perf_counter() - began_s
        print(progress_of(found, len(load)), file=sys.stderr)


def server_of(config: BenchConfig) -> Server:
    if not config.api_key_file:
        return Server(config.url)
    try:
        key = Path(config.api_key_file).read_text().strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise ConfigError("api_key_file", config.api_key_file, reason) from None
    usable = bool(key) and key.isascii() and key.isprintable()
    _check("api_key_file", config.api_key_file, usable, "must hold one key, and nothing else")
    return Server(config.url, key)


def fits(arrival: Arrival, target: Target) -> bool:
    most = target.max_model_len
    return most is None or arrival.num_prompt_tokens + arrival.num_output_tokens <= most


async def watch(found: Run, num_requests: int) -> None:
    """A line of progress: each second the same one on a terminal, else one in ten seconds."""
    is_terminal = sys.stderr.isatty()
    while True:
        await asyncio.sleep(1 if is_terminal else 10)
        end = "\r" if is_terminal else "\n"
        print(progress_of(found, num_requests), end=end, file=sys.stderr, flush=True)


def progress_of(found: Run, num_requests: int) -> str:
    states = Counter(answered.failure or "done" for answered in found.answers)
    done, running = states.pop("done", 0), states.pop("unfinished", 0)
    counts = f"{done} done, {running} running, {states.total()} failed"
    return f"{len(found.answers)} of {num_requests} sent: {counts}"


def figures_of(found: Run, slo: Slo) -> dict[str, object]:
    """By the names that `--json` shows. Times in seconds, of requests that did not fail; None where
    nothing was seen."""
    good = [answered for answered in found.answers if not answered.failure]
    failures = Counter(answered.failure for answered in found.answers if answered.failure)
    num_unfinished = failures.pop("unfinished", 0)
    ttfts_s = [answered.ttft_s for answered in good]
    gaps_s = [gap for answered in good for gap in answered.gaps_s]
    num_over = len(found.answers) - num_unfinished
    num_met = sum(slo.is_met(one.arrival, one.ttft_s, one.total_s) for one in good)
    num_prompt_tokens = sum(answered.arrival.num_prompt_tokens for answered in good)
    num_tokens = sum(answered.num_output_tokens for answered in found.answers)
    return {
        "requests": num_over,
        "failed": failures.total(),
        "failures": dict(failures.most_common()),
        "unfinished": num_unfinished,
        "skipped": found.num_skipped,
        "ttft_p50_s": percentile(ttfts_s, 50),
        "ttft_p90_s": percentile(ttfts_s, 90),
        "ttft_p99_s": percentile(ttfts_s, 99),
        "itl_p50_s": percentile(gaps_s, 50),
        "itl_p99_s": percentile(gaps_s, 99),
        "output_tokens_per_s": num_tokens / found.span_s if found.span_s else None,
        "hit_rate": share(sum(answered.num_cached for answered in good), num_prompt_tokens),
        "slo_met": share(num_met, num_over),
        "sent_late_p99_s": percentile([answered.late_s for answered in found.answers], 99),
    }


def percentile(values: Sequence[float], percent: int) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def share(count: int, total: int) -> float | None:
    return count / total if total else None


def table_of(figures: dict[str, object]) -> Table:
    """A row a figure, in the words of `paceline sim`."""
    table = Table("", "", box=None, pad_edge=False, show_header=False)
    for name, value in figures.items():
        match value:
            case float() if name == "output_tokens_per_s":
                text = f"{value:.1f}"
            case float() if name.endswith("_s"):
                text = f"{1000 * value:.1f} ms"
            case float():
                text = f"{value:.1%}"
            case dict():
                text = ", ".join(f"{reason}: {count}" for reason, count in value.items())
            case _:
                text = "–" if value is None else str(value)
        if text:
            table.add_row(_words(name), text)
    return table


def _words(name: str) -> str:
    special = {"failures": "  of them", "output_tokens_per_s": "output tok/s", "slo_met": "SLO met"}
    plain = name.removesuffix("_s").replace("_", " ")
    return special.get(name, plain.replace("ttft", "TTFT").replace("itl", "ITL"))
