"""Requests to a live deployment while something happens to it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.rollout import Count, Load, Traffic
from paceline.cli.cluster import Cluster
from tests.support.waits import until

START_S = 60.0


def during(cluster: Cluster, model: Path, load: Load, work: Callable[[], Awaitable[None]]) -> Count:
    """What came of requests that arrived before, during and after `work`."""

    async def disturbed() -> None:
        await asyncio.sleep(1)
        await work()
        await asyncio.sleep(1)

    async def run() -> Count:
        traffic = Traffic(cluster.base_url, model.name, load)
        await traffic.learn()
        return await traffic.during(asyncio.create_task(disturbed()))

    return asyncio.run(run())


async def back(cluster: Cluster, name: str, num_starts: int) -> None:
    """It was started again and is ready."""
    child = cluster.processes[name]
    await until(lambda: child.num_starts > num_starts and not child.probe(), START_S)
