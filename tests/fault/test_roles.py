"""Roles change under load, by the command: no client sees it, whatever dies meanwhile."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.deployment import NOTHING, deployment, mock_model, scrape, settle, total
from benchmarks.kill_worker import kill_tree
from benchmarks.rollout import Count, Load
from paceline.cli.cluster import Cluster
from paceline.core import metrics as names
from tests.support.disturbed import back, during
from tests.support.waits import until

LOAD = Load(per_second=4, max_tokens=60)
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
WAIT_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with mock_model(step_s=0.02) as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    """What dies is started again, in the role of its command."""
    with deployment(model, prefill=2, decode=2, routers=2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def begins_as_started(cluster: Cluster) -> None:
    for name in WORKERS:
        assert paceline_role(cluster, name, name.split("-")[0], "--force").returncode == 0


def paceline_role(cluster: Cluster, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command, as an operator gives it."""
    command = [sys.executable, "-P", "-m", "paceline.cli.main", "role", *arguments]
    return subprocess.run(
        [*command, "--router", cluster.router_endpoints],
        env={**os.environ, "PACELINE_ROLE_SECRET": cluster.secret, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
    )


async def change(cluster: Cluster, *arguments: str) -> str:
    done = await asyncio.to_thread(paceline_role, cluster, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def role_of(cluster: Cluster, worker: str) -> str:
    found = scrape(cluster.urls[worker]).get(names.WORKER_ROLE, [])
    return next((labels["role"] for labels, value in found if value), "")


def check(cluster: Cluster, count: Count) -> None:
    assert (count.failed, count.truncated, count.differing) == (0, 0, 0), count.reasons
    assert count.requests >= 4
    assert settle(cluster, 30) == NOTHING


def test_a_worker_goes_through_all_roles(cluster: Cluster, model: Path) -> None:
    async def work() -> None:
        for role in ("decode", "both", "prefill"):
            said = await change(cluster, "prefill-0", role, "--wait")
            assert f"→ {role}" in said and "prefill-0: 0 requests of its old role" in said
            assert role_of(cluster, "prefill-0") == role
            await asyncio.sleep(1)
        await change(cluster, "decode-1", "prefill", "--wait", "--drain-s", "0.2")

    incarnations = total(scrape(cluster.urls["prefill-0"]), names.WORKER_INCARNATIONS)
    check(cluster, during(cluster, model, LOAD, work))
    after = scrape(cluster.urls["prefill-0"])
    assert total(after, names.WORKER_INCARNATIONS) == incarnations, "its pool has stayed"
    assert total(after, names.WORKER_ROLE_CHANGES, role="both", reason="command") >= 1


def test_a_worker_is_killed_amid_its_change(cluster: Cluster, model: Path) -> None:
    async def work() -> None:
        num_starts = cluster.processes["decode-1"].num_starts
        await change(cluster, "decode-1", "prefill")
        kill_tree(cluster.processes["decode-1"].pid)
        await back(cluster, "decode-1", num_starts)

    check(cluster, during(cluster, model, LOAD, work))
    assert role_of(cluster, "decode-1") == "decode", "it starts as what its command says"


def test_a_router_is_killed_amid_a_change(cluster: Cluster, model: Path) -> None:
    async def work() -> None:
        routers = ("router", "router-1")
        starts = {name: cluster.processes[name].num_starts for name in routers}
        changing = asyncio.create_task(change(cluster, "decode-1", "prefill", "--wait"))
        await until(lambda: role_of(cluster, "decode-1") == "prefill", WAIT_S)
        cluster.kill("router")
        assert "0 requests of its old role" in await changing
        await back(cluster, "router", starts["router"])
        assert starts["router-1"] == cluster.processes["router-1"].num_starts

    check(cluster, during(cluster, model, LOAD, work))
    assert role_of(cluster, "decode-1") == "prefill"


def test_two_changes_at_once(cluster: Cluster, model: Path) -> None:
    async def work() -> None:
        await asyncio.gather(
            change(cluster, "prefill-0", "decode", "--wait"),
            change(cluster, "decode-0", "prefill", "--wait"),
        )

    check(cluster, during(cluster, model, LOAD, work))
    assert (role_of(cluster, "prefill-0"), role_of(cluster, "decode-0")) == ("decode", "prefill")


def test_the_command_lists_workers_and_refuses_what_cannot_be(cluster: Cluster) -> None:
    listed = paceline_role(cluster).stdout
    assert all(name in listed for name in WORKERS)
    wrong = paceline_role(cluster, "prefill-7", "decode")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("paceline: worker='prefill-7': the router knows no such one;")
    assert "decode-0, decode-1" in wrong.stderr
    assert paceline_role(cluster, "decode-0", "prefill").returncode == 0
    last = paceline_role(cluster, "decode-1", "prefill")
    assert last.returncode == 1 and "role='prefill': nobody else decodes" in last.stderr
    assert role_of(cluster, "decode-1") == "decode"
