"""`paceline sim`: should I disaggregate, and with how many of each?"""

from dataclasses import dataclass, replace
from typing import ClassVar

from rich.console import Console
from rich.table import Table

from paceline.core.config import setting
from paceline.core.errors import ConfigError
from paceline.router.placement import Placer
from paceline.sim.cluster import Load, Setup, replay
from paceline.sim.goodput import Summary, goodput, summarise
from paceline.sim.load import Sessions, arrivals_of, check_load
from paceline.sim.profile import H200_LLAMA_8B
from paceline.sim.slo import Slo

_check = ConfigError.check


@dataclass(frozen=True, slots=True)
class SimConfig:
    """Replay a trace on simulated H200 workers, aggregated and as xPyD; docs/simulation.md."""

    env_prefix: ClassVar[str] = "PACELINE_SIM_"

    trace: str = setting("", "File in the Mooncake format, .xz or plain.")
    requests: int = setting(2000, "How many requests of the load, from the first on.")
    workers: int = setting(8, "Workers in all.")
    prefill: str = setting("0,2,3,4", "How many of them prefill only: a row for each number.")
    time_scale: float = setting(
        0.0, "How many times as fast requests come; 0: at the first row's goodput."
    )
    seed: int = setting(0, "Of all chance: the same seed gives the same table.")
    noise: float = setting(0.1, "Of each step's time: at most this share more or less.")
    share: float = setting(0.9, "Of requests that have to get what was promised.")
    slo: Slo = Slo()
    synthetic: Sessions = Sessions()

    def __post_init__(self) -> None:
        check_load(self.trace, self.synthetic)
        for name in ("requests", "workers"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "must be at least 1")
        fit = all(0 <= count < self.workers for count in self.num_prefill)
        _check("prefill", self.prefill, fit, f"each must lie between 0 and {self.workers - 1}")
        _check("time_scale", self.time_scale, self.time_scale >= 0, "must not be negative")
        _check("noise", self.noise, 0 <= self.noise < 1, "must lie between 0 and 1")
        _check("share", self.share, 0 < self.share <= 1, "must lie between 0 and 1")

    @property
    def num_prefill(self) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in self.prefill.split(","))
        except ValueError:
            raise ConfigError("prefill", self.prefill, "must be numbers, split by commas") from None


@dataclass(frozen=True, slots=True)
class Row:
    fleet: str
    goodput: float  # requests a second
    time_scale: float  # at which the rest was measured
    summary: Summary


def run(config: SimConfig) -> int:
    table = Table("workers", "goodput", "SLO met", *_TIMES, "hit rate", box=None, pad_edge=False)
    shown: list[Row] = rows(config)
    for row in shown:
        seen = row.summary
        times = (seen.ttft_p50_s, seen.ttft_p99_s, seen.itl_p50_s, seen.itl_p99_s)
        cells = [f"{1000 * time:.1f}" for time in times]
        rate = f"{row.goodput:.2f} /s"
        table.add_row(row.fleet, rate, f"{seen.good:.1%}", *cells, f"{seen.hit_rate:.1%}")
    console = Console()
    console.print(table)
    pace = f"{shown[0].time_scale:.2f} times the trace's pace"
    console.print(f"Times in ms; all columns but goodput at {pace}.")
    return 0


_TIMES = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")


def rows(config: SimConfig) -> list[Row]:
    """One a fleet. Deterministic."""
    load = Load(arrivals_of(config.trace, config.synthetic, config.requests, config.seed))
    span_s = max(load.arrivals[-1].at_s, 1e-3)
    time_scale, guess, found = config.time_scale, 2.0, []
    for num_prefill in config.num_prefill:
        num_decode = config.workers - num_prefill
        setup = Setup(
            H200_LLAMA_8B,
            num_prefill,
            num_decode,
            noise=config.noise,
            seed=config.seed,
            slo=config.slo,
            slo_share=config.share,
        )
        most = goodput(setup, load, Placer, guess)
        guess = most or guess
        time_scale = time_scale or guess
        done = replay(replace(setup, time_scale=time_scale), load, Placer)
        name = f"{num_prefill}P{num_decode}D" if num_prefill else f"{num_decode} aggregated"
        rate = most * len(load.arrivals) / span_s
        found.append(Row(name, rate, time_scale, summarise(done, config.slo)))
    return found
