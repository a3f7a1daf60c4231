"""Two hundred thousand requests with unique prompts do not make a router grow.

Mock model, two prefill and two decode workers, 32 requests at once, each of its own tokens, so that
the index turns over many times. Memory of each process is looked at after every hundredth of the
requests; the first fifth, in which caches and the index fill up, does not count.

rss_slope_mib_per_min   of the router, by least squares
rss_slope_*             the same of the gateway and of the worker that grows most
in_flight_at_end        sum of all counters of running requests when the last has ended
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np

from benchmarks.common import Options, publish, show
from benchmarks.deployment import WORKERS, deployment, mock_model, settle
from benchmarks.footprint import resident_bytes
from benchmarks.loadgen import Call, send_all
from paceline.cli.cluster import Cluster

NUM_REQUESTS = 200_000
NUM_QUICK = 2_000
NUM_LOOKS = 100
WARM_LOOKS = 20
AT_ONCE = 32
VOCAB_SIZE = 4096
SEED = 11

Memory = dict[str, int]  # process → bytes


def calls(model: Path, num_requests: int, chance: Random) -> list[Call]:
    """Prompts of 33 to 64 tokens, so that prefill and decode both work, four tokens of output."""
    made = []
    for _ in range(num_requests):
        prompt = [chance.randrange(300, VOCAB_SIZE) for _ in range(chance.randint(33, 64))]
        body = {"model": model.name, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        made.append(Call(body, timeout_s=120))
    return made


def look(cluster: Cluster) -> Memory:
    """Raises psutil.NoSuchProcess when one has died: nothing starts it again."""
    children = cluster.processes.items()
    return {name: resident_bytes(child.pid) for name, child in children if name != "redis"}


def slopes(times_s: list[float], looks: list[Memory]) -> dict[str, float]:
    """MiB a minute of each process."""
    minutes = np.array(times_s) / 60
    return {
        name: float(np.polyfit(minutes, [memory[name] / (1 << 20) for memory in looks], 1)[0])
        for name in looks[0]
    }


def soak(cluster: Cluster, model: Path, num_requests: int) -> Iterator[tuple[int, float, Memory]]:
    """After each part: how many were not answered, the time, what memory the processes have."""
    chance = Random(SEED)
    for number in range(NUM_LOOKS):
        sent = calls(model, num_requests // NUM_LOOKS, chance)
        answers = asyncio.run(send_all(cluster.base_url, sent, AT_ONCE))
        if number % 10 == 9:
            show(f"{(number + 1) * len(sent)} of {num_requests} requests")
        yield sum(not a.is_complete for a in answers), time.monotonic(), look(cluster)


def measure(options: Options) -> dict[str, float]:
    num_requests = NUM_QUICK if options.quick else NUM_REQUESTS
    with (
        mock_model(VOCAB_SIZE) as model,
        deployment(model, prefill=2, decode=2, restart=False) as cluster,
    ):
        failed, times_s, looks = zip(*soak(cluster, model, num_requests), strict=True)
        left = settle(cluster)
    slope = slopes(list(times_s[WARM_LOOKS:]), list(looks[WARM_LOOKS:]))
    return {
        "rss_slope_mib_per_min": slope["router"],
        "rss_slope_gateway": slope["gateway"],
        "rss_slope_worker": max(slope[name] for name in slope if name.startswith(WORKERS)),
        "rss_growth_router_mib": (looks[-1]["router"] - looks[WARM_LOOKS]["router"]) / (1 << 20),
        "in_flight_at_end": left.in_flight + left.slots,
        "leaked_blocks": left.pages,
        "failed": sum(failed),
        "requests_per_s": num_requests / (times_s[-1] - times_s[0]) * (1 - 1 / NUM_LOOKS),
    }


def main() -> int:
    return publish("router_soak", measure)


if __name__ == "__main__":
    sys.exit(main())
