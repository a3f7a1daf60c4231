"""Goodput: the highest time-scale of a load at which enough requests meet their SLO."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.sim.cluster import Load, Outcome, Replay, Setup, replay
from paceline.sim.policies import PlacerOf
from paceline.sim.slo import Slo

RESOLUTION = 1.02  # two time-scales that differ by less are the same
FIRST_STEP = 1.1
LEAST, MOST = 0.05, 1000.0  # time-scales that are looked at


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one replay; times in seconds."""

    good: float  # share of requests that met the SLO
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float  # of tokens, not of requests
    itl_p99_s: float
    hit_rate: float  # prompt tokens that were not computed, of all


def good_share(outcomes: Sequence[Outcome], slo: Slo) -> float:
    return sum(slo.is_met(o.arrival, o.ttft_s, o.total_s) for o in outcomes) / len(outcomes)


def summarise(done: Replay, slo: Slo) -> Summary:
    outcomes = done.outcomes
    ttfts = np.array([outcome.ttft_s for outcome in outcomes])
    gaps = [gap for times in done.times for gap in times.gaps] or [(math.nan, 1)]
    itl_p50, itl_p99 = weighted_percentiles(gaps, (50, 99))
    num_tokens = sum(outcome.arrival.num_prompt_tokens for outcome in outcomes)
    return Summary(
        good_share(outcomes, slo),
        float(np.percentile(ttfts, 50)),
        float(np.percentile(ttfts, 99)),
        itl_p50,
        itl_p99,
        sum(outcome.num_cached for outcome in outcomes) / num_tokens,
    )


def weighted_percentiles(
    gaps: Sequence[tuple[float, int]], percents: Sequence[float]
) -> list[float]:
    """Of (seconds, how often)."""
    values, counts = (np.array(column, dtype=float) for column in zip(*gaps, strict=True))
    order = np.argsort(values)
    shares = np.cumsum(counts[order]) / counts.sum()
    found = [int(np.searchsorted(shares, percent / 100)) for percent in percents]
    return [float(values[order][min(index, len(values) - 1)]) for index in found]


def meets(setup: Setup, load: Load, make_placer: PlacerOf, time_scale: float) -> bool:
    """Enough requests get what was promised; a replay that fails ends early."""
    done = replay(replace(setup, time_scale=time_scale, gives_up=True), load, make_placer)
    return not done.gave_up and good_share(done.outcomes, setup.slo) >= setup.slo_share


def goodput(setup: Setup, load: Load, make_placer: PlacerOf, guess: float = 1.0) -> float:
    """The time-scale, to within RESOLUTION. The search begins at `guess`.

    0: less than LEAST. MOST: a load that is too short to overload anyone.
    """
    step = FIRST_STEP
    if meets(setup, load, make_placer, guess):
        below, above = guess, guess * step
        while meets(setup, load, make_placer, above):
            if above >= MOST:
                return MOST
            step *= FIRST_STEP
            below, above = above, min(MOST, above * step)
    else:
        below, above = guess / step, guess
        while not meets(setup, load, make_placer, below):
            if below < LEAST:
                return 0.0
            step *= FIRST_STEP
            below, above = below / step, below
    while above / below > RESOLUTION:
        middle = math.sqrt(below * above)
        if meets(setup, load, make_placer, middle):
            below = middle
        else:
            above = middle
    return below
