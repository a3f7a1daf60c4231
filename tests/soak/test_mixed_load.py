"""Minutes of mixed load with all timers at their full length, while workers and Redis go down.

PACELINE_SOAK_S sets how long the load lasts, in all its rounds together (600). Between rounds
nothing runs, and then nothing may be left: no page, no slot, no descriptor, no memory.
"""

import asyncio
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from benchmarks.deployment import NOTHING, WORKERS, deployment, mock_model, settle
from paceline.cli.cluster import Cluster
from tests.support.soak_faults import FAULTS, Fault, disturb, recover
from tests.support.soak_traffic import Tally, Template, make_templates, traffic

SOAK_S = float(os.environ.get("PACELINE_SOAK_S", "600"))
NUM_ROUNDS = 5
NUM_WORKERS = 4
AT_ONCE = 12
CALM_S = 2.0  # between two faults
VOCAB_SIZE = 4096
SEED = 20
POOL_MIB = 16
MAX_GROWTH_MIB = 32  # of a process since its first idle moment
PEER_FDS = 4  # of a worker's front, for each worker that it knows: a channel, its pool
QUIET_S = 15.0  # at most, until connections of the round are closed

Process = tuple[str, int]  # name and pid of one life


@dataclass(frozen=True, slots=True)
class Held:
    """By a process at rest."""

    rss_mib: float
    num_fds: int

    def __str__(self) -> str:
        return f"{self.rss_mib:.0f} MiB and {self.num_fds} fds"


@pytest.fixture
def model() -> Iterator[Path]:
    with mock_model(vocab_size=VOCAB_SIZE, step_s=0.01, token_s=0.00005) as folder:
        yield folder


@pytest.mark.soak
@pytest.mark.timeout(SOAK_S + 900)
def test_nothing_is_lost_left_or_wrong_after_minutes_of_faults(model: Path) -> None:
    with mock_model(vocab_size=VOCAB_SIZE) as twin:
        templates = make_templates(model, twin, VOCAB_SIZE, SEED)
    chance = random.Random(SEED)
    faults = itertools.cycle(FAULTS)
    seen: dict[Process, list[Held]] = {}
    with deployment(
        model, prefill=2, decode=NUM_WORKERS - 2, worker={"pool_mib": POOL_MIB}
    ) as cluster:
        for number in range(NUM_ROUNDS):
            tally = asyncio.run(one_round(cluster, templates, chance, faults))
            show(f"round {number + 1}: {tally.num_complete} answered, {tally.num_left} left early")
            assert tally.num_complete > AT_ONCE
            assert (tally.unanswered, tally.differing) == ([], [])
            assert settle(cluster, QUIET_S) == NOTHING
            for process, held in processes(cluster).items():
                seen.setdefault(process, []).append(held)
    for (name, pid), lives in seen.items():
        show(f"{name} {pid}: {', '.join(map(str, lives))}")
    grown = [process for process, lives in seen.items() if has_grown(process[0], lives)]
    assert not grown


async def one_round(
    cluster: Cluster, templates: list[Template], chance: random.Random, faults: Iterator[Fault]
) -> Tally:
    tally, stop = Tally(), asyncio.Event()
    ends = time.monotonic() + SOAK_S / NUM_ROUNDS
    sending = asyncio.create_task(
        traffic(cluster.base_url, templates, AT_ONCE, tally, stop, chance)
    )
    while time.monotonic() < ends:
        await asyncio.sleep(CALM_S)
        show(await asyncio.to_thread(disturb, cluster, next(faults), chance))
    stop.set()
    await sending
    await asyncio.to_thread(recover, cluster)
    return tally


def processes(cluster: Cluster) -> dict[Process, Held]:
    found = {}
    for name, child in cluster.processes.items():
        front = psutil.Process(child.pid)
        found[name, front.pid] = held_by(front)
        for rank in front.children():
            found[f"rank of {name}", rank.pid] = held_by(rank)
    return found


def held_by(process: psutil.Process) -> Held:
    return Held(process.memory_info().rss / (1 << 20), process.num_fds())


def has_grown(name: str, lives: list[Held]) -> bool:
    """Fronts of workers may come to know more peers, and then map the pools of these."""
    num_peers = NUM_WORKERS - 1 if name.startswith(WORKERS) else 0
    max_mib = lives[0].rss_mib + MAX_GROWTH_MIB + num_peers * POOL_MIB
    max_fds = lives[0].num_fds + num_peers * PEER_FDS
    return any(held.rss_mib > max_mib or held.num_fds > max_fds for held in lives)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
