"""Three routers that do not talk to each other, beside one that decides everything. Virtual time.

Trace, workers, noise and SLO of benchmarks.trace_replay. Each request comes to one of the three by
lot; each router has a mirror of its own, hears of all workers' loads and pool events, and knows
nothing of what the others have sent and workers have not told yet: they tell when a step ends.

The trace knows arrivals by three seconds: up to 19 at one instant, of which no router can know what
the others do with theirs. So they are spread evenly until the next instant. Three seeds, a search
for each.

three_routers_goodput_of_one   of the means over the seeds; worst_seed: the least of them
in_bursts_of_one               the same with the instants as they are, by the first seed
ttft_p99_three_of_one          at one router's goodput, on average over the seeds
--quick: the first 2000 requests.
"""

import statistics
import sys
from dataclasses import replace

from benchmarks.common import Options, publish, show
from benchmarks.trace_replay import QUICK_REQUESTS, SEEDS, SETUP, TRACE, ttft_p99
from paceline.router.placement import Placer
from paceline.sim.cluster import Load
from paceline.sim.goodput import goodput
from paceline.sim.trace import read_mooncake, spread_evenly

NUM_ROUTERS = 3


def goodputs(load: Load, seed: int, guess: float) -> tuple[float, float]:
    """Of one router and of three."""
    setup = replace(SETUP, seed=seed)
    one = goodput(setup, load, Placer, guess)
    three = goodput(replace(setup, num_routers=NUM_ROUTERS), load, Placer, one)
    show(f"seed {seed}: one router {one:.3f}, three {three:.3f}")
    return one, three


def slower(load: Load, seed: int, time_scale: float) -> float:
    """TTFT's 99th percentile of three over that of one."""
    setup = replace(SETUP, seed=seed, time_scale=time_scale)
    of_three = ttft_p99(replace(setup, num_routers=NUM_ROUTERS), load, Placer)
    return of_three / ttft_p99(setup, load, Placer)


def measure(options: Options) -> dict[str, float]:
    arrivals = read_mooncake(TRACE, QUICK_REQUESTS if options.quick else None)
    load = Load(spread_evenly(arrivals))
    found: list[tuple[float, float]] = []
    p99s: list[float] = []
    for seed in SEEDS:
        found.append(goodputs(load, seed, found[-1][0] if found else 3.5))
        p99s.append(slower(load, seed, found[-1][0]))
    show("as the trace has them")
    one_in_bursts, three_in_bursts = goodputs(Load(arrivals), SEEDS[0], found[0][0])
    ones, threes = zip(*found, strict=True)
    return {
        "goodput_one": statistics.mean(ones),
        "goodput_three": statistics.mean(threes),
        "three_routers_goodput_of_one": statistics.mean(threes) / statistics.mean(ones),
        "worst_seed": min(three / one for one, three in found),
        "in_bursts_of_one": three_in_bursts / one_in_bursts,
        "ttft_p99_three_of_one": statistics.mean(p99s),
    }


def main() -> int:
    return publish("several_routers", measure)


if __name__ == "__main__":
    sys.exit(main())
