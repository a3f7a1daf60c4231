"""Dynamo's RadixTree: a lookup of one chain. Arguments: file of blocks by worker, lookups."""

import json
import statistics
import sys
import time
from pathlib import Path

from dynamo.llm import RadixTree  # type: ignore[import-not-found]


def store(tree: RadixTree, worker: int, hashes: list[int]) -> None:
    blocks = [{"block_hash": number, "tokens_hash": number} for number in hashes]
    stored = {"parent_hash": None, "blocks": blocks}
    event = {"event_id": worker, "data": {"stored": stored}, "dp_rank": 0}
    tree.apply_event(worker, json.dumps(event).encode())


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    tree = RadixTree()
    for worker, hashes in plan["other"].items():
        store(tree, int(worker), hashes)
    for worker, depth in plan["held"].items():
        store(tree, int(worker), plan["chain"][:depth])
    times = []
    for _ in range(int(sys.argv[2])):
        began = time.perf_counter()
        scores = tree.find_matches(plan["chain"]).scores
        times.append(time.perf_counter() - began)
    figures = {str(worker): depth for (worker, _), depth in scores.items()}
    figures["lookup_us"] = statistics.median(times) * 1e6
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
