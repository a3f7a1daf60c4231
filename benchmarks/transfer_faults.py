"""Whatever goes wrong between a reader and its source, at whichever step, costs a retry at most.

Workers on the mock model, whose tokens are hashes of the KV that they read, as processes; between
them proxies that see every message (benchmarks/transfer_faults_seam.py). Each case: one request is
split, and one thing goes wrong at one step (benchmarks/transfer_faults_cases.py). Each transport
that can be had is tried; the quick form has fewer cases and shorter timers.

wrong_tokens    that differ from the same request's on a worker that nothing happens to
leaked_blocks   pages of source and reader that are neither free nor cached in the end
hung            requests whose reader neither answers nor gives up
unusable        pairs, of which nobody died, that did not work again afterwards
missed          cases whose step was not reached
partial         of the cases in mid-read, those that struck while some pages were there
"""

import asyncio
import sys

from benchmarks.common import Options, publish, show
from benchmarks.deployment import mock_model
from benchmarks.transfer_faults_bench import run_cases
from benchmarks.transfer_faults_cases import all_cases, quick_cases
from benchmarks.transfer_faults_hand import Outcome
from benchmarks.transfer_faults_workers import DEFAULT, SHORT
from paceline.kv_transfer import registry

TRANSPORTS = ("shm", "tcp", "nixl", "multi", "ucx")
QUICK_TRANSPORTS = ("shm", "tcp")
MODEL = {"num_hidden_layers": 8, "head_dim": 64, "step_s": 0.002}  # pages of 128 KiB


def figures_of(transport: str, *, quick: bool) -> dict[str, float]:
    cases, timers = (quick_cases, SHORT) if quick else (all_cases, DEFAULT)
    with mock_model(260, **MODEL) as model:
        found = asyncio.run(run_cases(model, transport, timers, cases(transport)))
    figures = {name: getattr(found, name) for name in Outcome.__slots__}
    return {"cases": len(cases(transport)), **figures}


def measure(options: Options) -> dict[str, float]:
    total: dict[str, float] = {}
    for transport in QUICK_TRANSPORTS if options.quick else TRANSPORTS:
        if reason := registry.problem_of(transport):
            show(f"{transport} {reason}")
            continue
        figures = figures_of(transport, quick=options.quick)
        for key, value in figures.items():
            total[key] = total.get(key, 0) + value
        total[f"cases_{transport}"] = figures["cases"]
    return total


def main() -> int:
    return publish("transfer_faults", measure)


if __name__ == "__main__":
    sys.exit(main())
