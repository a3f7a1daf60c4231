"""Ten thousand hand-offs, 30 % of which are cancelled at random moments, leave nothing behind.

Mock model, two prefill and two decode workers, 16 requests at once, half of them over shm and half
over tcp. Clients hang up in the queue, while the prompt is computed, while its KV travels, in
mid-stream. The first tenth warms up: the pools are so small that it gives each page a name, which
takes memory as long as the page has it. What each worker's memory grows by from there to the end,
page pools left out, is a leak.

handoffs         requests that were planned to be prefilled apart
rss_growth_mib   of the worker that grew most
"""

import asyncio
import sys
from pathlib import Path

from benchmarks.cancel_storm import AT_ONCE, calls, outcome
from benchmarks.common import Options, publish, show
from benchmarks.deployment import WORKERS, deployment, mock_model, scrape, settle, total
from benchmarks.footprint import resident_bytes
from benchmarks.loadgen import send_all
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names

NUM_REQUESTS = 5500  # a transport; a few prompts are short or cached and prefilled by decode
NUM_QUICK = 500
CANCELLED_SHARE = 0.3
TRANSPORTS = ("shm", "tcp")
POOL_MIB = 16  # 4096 pages
VOCAB_SIZE = 4096


def workers_bytes(cluster: Cluster) -> dict[str, int]:
    """Raises psutil.NoSuchProcess when one has died: nothing starts it again."""
    processes = {name: child.pid for name, child in cluster.processes.items()}
    return {n: resident_bytes(pid) for n, pid in processes.items() if n.startswith(WORKERS)}


def grown_mib(before: dict[str, int], after: dict[str, int]) -> float:
    return max(after[name] - before[name] for name in before) / (1 << 20)


def storm(model: Path, transport: str, num_requests: int) -> dict[str, float]:
    sent = calls(model, VOCAB_SIZE, num_requests, CANCELLED_SHARE)
    num_warm = num_requests // 10
    worker = {"transports": transport, "pool_mib": POOL_MIB}
    with deployment(model, prefill=2, decode=2, worker=worker, restart=False) as cluster:
        show(f"{num_requests} requests over {transport}")
        answers = asyncio.run(send_all(cluster.base_url, sent[:num_warm], AT_ONCE))
        settle(cluster)
        before = workers_bytes(cluster)
        answers += asyncio.run(send_all(cluster.base_url, sent[num_warm:], AT_ONCE))
        left = settle(cluster)
        after = workers_bytes(cluster)
        router = scrape(cluster.urls["router"])
    figures = outcome(sent, answers)
    figures |= {"leaked_blocks": left.pages, "leaked_slots": left.slots}
    figures |= {"still_in_flight": left.in_flight, "unbalanced_pools": left.unbalanced}
    figures["handoffs"] = total(router, names.ROUTER_PLANS, kind="split")
    return figures | {"rss_growth_mib": grown_mib(before, after)}


def measure(options: Options) -> dict[str, float]:
    num_requests = NUM_QUICK if options.quick else NUM_REQUESTS
    with mock_model(VOCAB_SIZE) as model:
        found = [storm(model, transport, num_requests) for transport in TRANSPORTS]
    figures = {key: sum(one[key] for one in found) for key in found[0]}
    return figures | {"rss_growth_mib": max(one["rss_growth_mib"] for one in found)}


def main() -> int:
    return publish("handoff_storm", measure)


if __name__ == "__main__":
    sys.exit(main())
