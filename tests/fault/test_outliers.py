"""Workers that live and fail what they get are left alone for a while; retries stay a share."""

import asyncio
from collections.abc import Iterator

import pytest

from paceline.router import outliers, retry_budget
from paceline.v1 import common_pb2
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import Bench, router_bench
from tests.support.waits import until

INTERNAL = common_pb2.ERROR_CODE_INTERNAL


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def is_ejected(bench: Bench, name: str) -> bool:
    session = bench.router.fleet.links[name].session
    assert session is not None
    return session.health.ejected_until > asyncio.get_running_loop().time()


async def test_a_worker_that_fails_everything_gets_nothing_until_it_is_tried_again(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failing at once it looks idle, and would get every request first."""
    monkeypatch.setattr(outliers, "EJECTED_S", (0.4, 60.0))
    monkeypatch.setattr(outliers, "JITTER", 0.0)
    monkeypatch.setattr(retry_budget, "LEAST", 1000)  # it may have half of all before it is known
    async with router_bench(store) as bench:
        ill = await bench.add("d0", fail_with=INTERNAL)
        await bench.add("d1", step_s=0.01)
        client = await bench.client()
        answers = [await client.submit(max_tokens=20) for _ in range(60)]
        await until(lambda: all(answer.ended for answer in answers), 20)
        for answer in answers:
            answer.check(20)
        first = len(ill.commands("run"))
        assert outliers.MIN_FAILURES <= first < 45
        tried = first
        while tried < first + 2:  # one request each time, not all that come
            (await client.generate(max_tokens=2)).check(2)
            assert len(ill.commands("run")) <= tried + 1
            tried = len(ill.commands("run"))
        ill.fail_with = None
        await until(lambda: not is_ejected(bench, "d0"), 20)
        before = len(ill.commands("run"))
        while len(ill.commands("run")) < before + 5:
            answers = [await client.submit(max_tokens=2) for _ in range(8)]
            await until(lambda: all(answer.ended for answer in answers))  # noqa: B023
        session = bench.router.fleet.links["d0"].session
        assert session is not None and session.health.num_failures == 0
        await bench.check_idle()


async def test_half_of_the_workers_stay_and_the_last_one_comes_back_at_once(
    store: RedisServer,
) -> None:
    async with router_bench(store, max_attempts=2) as bench:
        workers = [await bench.add(f"d{i}", fail_with=INTERNAL) for i in range(3)]
        client = await bench.client()
        for _ in range(30):
            await client.generate(max_tokens=2)
        names = [worker.worker_id for worker in workers]
        (ejected,) = [name for name in names if is_ejected(bench, name)]
        for name in names:
            bench.workers[name].fail_with = None
            if name != ejected:
                await bench.workers[name].die()
        (await client.generate(max_tokens=2)).check(2)
        assert not is_ejected(bench, ejected)


async def test_a_worker_keeps_its_bad_name_when_its_stream_breaks(store: RedisServer) -> None:
    async with router_bench(store, max_attempts=2) as bench:
        ill = await bench.add("d0", fail_with=INTERNAL)
        await bench.add("d1")
        client = await bench.client()
        answers = [await client.submit(max_tokens=2) for _ in range(40)]
        await until(lambda: all(answer.ended for answer in answers))
        assert is_ejected(bench, "d0")
        session = bench.router.fleet.links["d0"].session
        for stream in ill.streams:
            stream.frames.put_nowait(None)
        await until(lambda: bench.router.fleet.links["d0"].session not in (None, session))
        assert is_ejected(bench, "d0")


async def test_a_fault_of_all_workers_does_not_multiply_their_load(store: RedisServer) -> None:
    """Without a budget each of 400 requests would be tried five times."""
    async with router_bench(store) as bench:
        workers = [await bench.add(f"d{i}", fail_with=INTERNAL) for i in range(2)]
        client = await bench.client()
        for _ in range(20):
            answers = [await client.submit(max_tokens=2) for _ in range(20)]
            await until(lambda: all(answer.ended for answer in answers), 20)  # noqa: B023
        num_tried = sum(len(worker.commands("run")) for worker in workers)
        assert 400 <= num_tried <= 400 + 2 * retry_budget.LEAST
        refused = bench.router.metrics.retries_refused._value.get()
        assert refused > 300
        for worker in workers:
            worker.fail_with = None
        await until(lambda: not any(is_ejected(bench, w.worker_id) for w in workers), 20)
        answers = [await client.submit(max_tokens=2) for _ in range(20)]
        await until(lambda: all(answer.ended for answer in answers), 20)
        for answer in answers:
            answer.check(2)
        await bench.check_idle()


async def test_all_streams_of_a_worker_that_dies_go_on_whatever_the_budget(
    store: RedisServer,
) -> None:
    async with router_bench(store) as bench:
        dying = await bench.add("d0", step_s=0.02)
        client = await bench.client()
        answers = [await client.submit(max_tokens=30) for _ in range(120)]
        await until(lambda: all(answer.tokens for answer in answers), 20)
        bench.router.coordinator._retries.budget.owed = 1000.0
        await dying.die()
        await bench.add("d1")
        await until(lambda: all(answer.ended for answer in answers), 20)
        for answer in answers:
            answer.check(30)
