"""Three routers that do not talk to each other, beside one that decides everything. Virtual time.

Trace, workers, noise and SLO of benchmarks.trace_replay. Each request comes to one of the three by
lot; each router has a mirror of its own, hears of all workers' loads and pool events, and knows
nothing of what the others have sent and workers have not told yet. Three seeds, a search for each.

three_routers_goodput_of_one   of the means over the seeds; worst_seed: the least of them
ttft_p99_three_of_one          at one router's goodput, on average over the seeds
--quick: the first 2000 requests.
"""

import statistics
import sys
from dataclasses import replace

from benchmarks.common import Options, publish, show
from benchmarks.trace_replay import QUICK_REQUESTS, SEEDS, SETUP, TRACE, ttft_p99
from paceline.router.placement import Placer
from paceline.sim.cluster import Load, Setup
from paceline.sim.goodput import goodput
from paceline.sim.trace import read_mooncake

NUM_ROUTERS = 3


def measure(options: Options) -> dict[str, float]:
    load = Load(read_mooncake(TRACE, QUICK_REQUESTS if options.quick else None))
    ones, threes, slower, guess = [], [], [], 2.0
    for seed in SEEDS:
        one: Setup = replace(SETUP, seed=seed)
        three = replace(one, num_routers=NUM_ROUTERS)
        ones.append(goodput(one, load, Placer, guess))
        threes.append(goodput(three, load, Placer, ones[-1]))
        guess = ones[-1]
        show(f"seed {seed}: one router {ones[-1]:.3f}, three {threes[-1]:.3f}")
        p99_s = [ttft_p99(replace(s, time_scale=ones[-1]), load, Placer) for s in (three, one)]
        slower.append(p99_s[0] / p99_s[1])
    return {
        "goodput_one": statistics.mean(ones),
        "goodput_three": statistics.mean(threes),
        "three_routers_goodput_of_one": statistics.mean(threes) / statistics.mean(ones),
        "worst_seed": min(three / one for three, one in zip(threes, ones, strict=True)),
        "ttft_p99_three_of_one": statistics.mean(slower),
    }


def main() -> int:
    return publish("several_routers", measure)


if __name__ == "__main__":
    sys.exit(main())
