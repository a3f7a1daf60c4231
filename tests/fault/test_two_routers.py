"""One of two routers is killed, hangs or is rolled under load: no client sees it."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.deployment import NOTHING, deployment, mock_model, scrape, settle, total
from benchmarks.rollout import Count, Load
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names
from tests.support.disturbed import back, during

LOAD = Load(per_second=4, max_tokens=80)
ROUTERS = ("router", "router-1")  # the gateway begins with the first
HANG_S = 5.0  # a gateway leaves a router that was silent for three seconds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with mock_model(step_s=0.02) as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    """Split requests; what dies is started again."""
    with deployment(model, routers=2) as cluster:
        yield cluster


def num_moved(cluster: Cluster, reason: str = "") -> float:
    labels = {"reason": reason} if reason else {}
    return total(scrape(cluster.base_url), names.GATEWAY_MOVED, **labels)


def in_use(cluster: Cluster) -> str:
    """The router that serves."""
    sent = {name: total(scrape(cluster.urls[name]), names.ROUTER_IN_FLIGHT) for name in ROUTERS}
    return max(sent, key=lambda name: sent[name])


def check(count: Count) -> None:
    assert (count.failed, count.truncated, count.differing) == (0, 0, 0), count.reasons
    assert count.requests >= 8


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_requests_go_on_at_the_other_router_with_the_same_tokens(
    cluster: Cluster, model: Path, number: signal.Signals
) -> None:
    before = num_moved(cluster, "lost")

    async def disturb() -> None:
        name = in_use(cluster)
        num_starts = cluster.processes[name].num_starts
        cluster.kill(name, number)
        if number is signal.SIGKILL:
            await back(cluster, name, num_starts)
        else:
            await asyncio.sleep(HANG_S)
            cluster.kill(name, signal.SIGCONT)

    check(during(cluster, model, LOAD, disturb))
    assert num_moved(cluster, "lost") > before
    assert settle(cluster) == NOTHING


def test_a_rolling_restart_of_both_costs_nothing(cluster: Cluster, model: Path) -> None:
    lost, exits = num_moved(cluster, "lost"), []

    async def roll() -> None:
        for name in ROUTERS:
            child = cluster.processes[name]
            num_starts = child.num_starts
            exits.append(await asyncio.to_thread(child.end, 40))
            await back(cluster, name, num_starts)

    check(during(cluster, model, LOAD, roll))
    assert exits == [True, True], "they leave by themselves, with 0"
    assert num_moved(cluster, "lost") == lost, "what runs ends where it is"
    assert settle(cluster) == NOTHING
