"""A gateway that knows two routers goes on with the second when the first is killed or hangs."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.deployment import mock_model, scrape, total
from benchmarks.loadgen import send
from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.cli.ports import free_port
from paceline.cli.roles import make_child
from paceline.core import metrics as names
from tests.support.end_to_end import prompt, streaming

SILENCE_S = 3.0  # how long a gateway waits for a router that hangs


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with mock_model(step_s=0.01) as folder:
        yield folder


@pytest.fixture
def cluster(model: Path, tmp_path: Path) -> Iterator[Cluster]:
    """One decode worker, attached to by both routers; `router-b` is the second."""
    first, second = (free_port("127.0.0.1") for _ in range(2))
    routers = (f"127.0.0.1:{first}", f"127.0.0.1:{second}")
    settings = {"router": {"port": first}, "gateway": {"router": routers}}
    spec = ClusterSpec(model, 0, 1, settings=settings, restart=False, run_parent=tmp_path)  # type: ignore[arg-type]
    with Cluster(spec) as cluster:
        own = {"host": "127.0.0.1", "port": second, "probe_port": free_port("127.0.0.1")}
        environment = {"PACELINE_ROUTER_SECRET": cluster.secret}
        given = {**own, "redis_url": cluster.redis_url}
        child = make_child("router-b", "router", given, environment, cluster.folder)
        child.start()
        try:
            deadline = time.monotonic() + 30
            while child.probe():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert total(scrape(f"http://127.0.0.1:{own['probe_port']}"), names.ROUTER_WORKER_UP)
            yield cluster
        finally:
            child.end(10)
            child.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_new_requests_go_to_the_next_router(
    cluster: Cluster, model: Path, number: signal.Signals
) -> None:
    call = streaming(model, prompt(50), max_tokens=5, temperature=0)
    before = asyncio.run(send(cluster.base_url, call))
    cluster.kill("router", number)
    killed = time.monotonic()
    try:
        while not (after := asyncio.run(send(cluster.base_url, call))).is_complete:
            assert time.monotonic() - killed < SILENCE_S + 5
    finally:
        cluster.kill("router", signal.SIGCONT)
    assert after.token_ids() == before.token_ids()
