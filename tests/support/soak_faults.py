"""What goes wrong in a deployment that runs for long: one thing at a time, and back to health."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from benchmarks.deployment import WORKERS
from benchmarks.kill_worker import kill_tree
from paceline.cli.cluster import Cluster
from paceline.cli.setup_error import SetupError

FREEZE_S = 3.0
HANG_S = 20.0  # a worker starts a rank that hangs anew long before
RECOVERY_S = 90.0


def kill_worker(cluster: Cluster, name: str) -> None:
    kill_tree(cluster.processes[name].pid)


def kill_rank(cluster: Cluster, name: str) -> None:
    os.kill(rank_of(cluster, name).pid, signal.SIGKILL)


def freeze_rank(cluster: Cluster, name: str) -> None:
    rank = rank_of(cluster, name)
    rank.suspend()
    time.sleep(FREEZE_S)
    with suppress(psutil.NoSuchProcess):
        rank.resume()


def hang_rank(cluster: Cluster, name: str) -> None:
    rank = rank_of(cluster, name)
    rank.suspend()
    rank.wait(HANG_S)


def freeze_worker(cluster: Cluster, name: str) -> None:
    """Its front; longer than routers and peers wait."""
    cluster.kill(name, signal.SIGSTOP)
    time.sleep(2 * FREEZE_S)
    cluster.kill(name, signal.SIGCONT)


def restart_redis(cluster: Cluster, name: str) -> None:
    cluster.kill(name)


def freeze_redis(cluster: Cluster, name: str) -> None:
    cluster.kill(name, signal.SIGSTOP)
    time.sleep(FREEZE_S)
    cluster.kill(name, signal.SIGCONT)


Fault = Callable[[Cluster, str], None]
FAULTS: tuple[Fault, ...] = (
    kill_worker,
    restart_redis,
    kill_rank,
    freeze_rank,
    hang_rank,
    freeze_redis,
    freeze_worker,
)


def rank_of(cluster: Cluster, name: str) -> psutil.Process:
    (rank,) = psutil.Process(cluster.processes[name].pid).children()
    return rank


def disturb(cluster: Cluster, fault: Fault, chance: random.Random) -> str:
    """Does `fault` to one worker, or to Redis, and returns when all is well again; what it was."""
    workers = [name for name in cluster.processes if name.startswith(WORKERS)]
    victim = "redis" if fault in (restart_redis, freeze_redis) else chance.choice(workers)
    fault(cluster, victim)
    recover(cluster)
    return f"{fault.__name__} {victim}"


def recover(cluster: Cluster) -> None:
    deadline = time.monotonic() + RECOVERY_S
    while True:
        try:
            cluster.wait_ready()
            break
        except SetupError:  # one is down until the keeper starts it
            assert time.monotonic() < deadline, "not all came back"
            time.sleep(0.2)
    num_workers = sum(name.startswith(WORKERS) for name in cluster.processes)
    cluster.wait_connected(num_workers, RECOVERY_S)
