"""Requests that kill their workers: two may die of one, which is refused then; nobody else is."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from paceline.router import placement, retries, suspects
from paceline.v1 import common_pb2
from tests.support.fake_worker import FakeWorker
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import Answer, Bench, router_bench
from tests.support.waits import until

QUARANTINED = common_pb2.ERROR_CODE_REQUEST_QUARANTINED
POISON = [666] * 40  # a prompt that workers die of


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def add(bench: Bench, *names: str, **fields: Any) -> list[FakeWorker]:
    return [await bench.add(name, poison=POISON[0], **fields) for name in names]


def num_caught(bench: Bench) -> float:
    found: float = bench.router.metrics.requests_quarantined._value.get()
    return found


async def innocent(bench: Bench, answers: Sequence[Answer], num_tokens: int) -> None:
    """All get their tokens, and nothing is refused from then on."""
    await until(lambda: all(answer.ended for answer in answers), 30)
    for answer in answers:
        answer.check(num_tokens)
    assert not num_caught(bench)


def is_alive(bench: Bench, worker: FakeWorker) -> bool:
    return bench.router.fleet.session_of(worker.worker_id, worker.info.incarnation) is not None


async def test_a_request_that_killed_two_workers_is_refused_and_so_is_what_equals_it(
    store: RedisServer,
) -> None:
    async with router_bench(store) as bench:
        workers = await add(bench, "d0", "d1", "d2")
        client = await bench.client()
        answer = await client.generate(prompt=POISON)
        assert answer.error is not None and answer.error.code == QUARANTINED
        assert answer.num_ends == 1 and not answer.error.retry_after_ms
        (alive,) = [worker for worker in workers if is_alive(bench, worker)]
        assert not alive.commands("run") and num_caught(bench) == 1
        again = await client.generate(prompt=POISON, max_tokens=3)
        assert again.error is not None and again.error.code == QUARANTINED
        assert not alive.commands("run"), "not one worker more"
        (await client.generate(num_prompt=100)).check(8)
        (told,) = bench.router.coordinator.suspects.quarantine.to_proto()
        assert told.request_id == answer.request.request_id and 0 < told.left_s <= 600
        assert len({life.worker_id for life in told.killed}) == 2


async def test_it_may_come_again_when_its_time_is_over(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "REMEMBERED_S", 3.0)
    async with router_bench(store) as bench:
        workers = await add(bench, "d0", "d1", "d2")
        client = await bench.client()
        assert (await client.generate(prompt=POISON)).error is not None
        for worker in workers:
            worker.poison = None
        book = bench.router.coordinator.suspects.quarantine
        await until(lambda: not book.to_proto())
        (await client.generate(prompt=POISON)).check(8)


async def test_no_other_tenant_is_refused_for_it(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        workers = await add(bench, "d0", "d1", "d2")
        client = await bench.client()
        assert (await client.generate(prompt=POISON)).error is not None
        for worker in workers:
            worker.poison = None
        (await client.generate(prompt=POISON, tenant="u")).check(8)
        refused = await client.generate(prompt=POISON)
        assert refused.error is not None and refused.error.code == QUARANTINED


@pytest.mark.parametrize("num_before", [0, 4])
async def test_those_that_were_there_at_both_deaths_are_tried_one_by_one(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    """Two deaths do not tell the killer from four others, not even when all of these are acquitted
    before it: a third death tells. Nobody else loses a token."""
    monkeypatch.setattr(retries, "PAUSE_S", (0.0, 0.0))  # they go on in their order
    async with router_bench(store) as bench:
        (first,) = await add(bench, "d0", prefill_s=0.2)
        client = await bench.client()
        others = [await client.submit(num_prompt=50, max_tokens=30) for _ in range(num_before)]
        killer = await client.submit(prompt=POISON)
        others += [await client.submit(num_prompt=50, max_tokens=30) for _ in range(4 - num_before)]
        await until(lambda: not is_alive(bench, first))
        assert len(first.commands("run")) == 5
        (second,) = await add(bench, "d1", prefill_s=0.2)
        await until(lambda: not is_alive(bench, second))
        assert not killer.ended and not num_caught(bench)
        await add(bench, "d2", "d3", prefill_s=0.2)
        await until(lambda: all(answer.ended for answer in [*others, killer]), 20)
        assert killer.error is not None and killer.error.code == QUARANTINED
        for answer in others:
            answer.check(30)
        num_dead = sum(not is_alive(bench, worker) for worker in bench.workers.values())
        assert num_dead == 3 and num_caught(bench) == 1
        await bench.check_idle()


async def test_who_gets_on_between_two_deaths_is_innocent(store: RedisServer) -> None:
    async with router_bench(store, max_attempts=8) as bench:
        client = await bench.client()
        answer: Answer | None = None
        for number in range(4):
            worker = await bench.add(f"d{number}", step_s=0.01)
            answer = answer or await client.submit(max_tokens=200)
            before = len(answer.tokens.get(0, ()))
            await until(lambda: len(answer.tokens.get(0, ())) > before + 10)  # noqa: B023
            await worker.die()
        await bench.add("d4")
        await until(lambda: answer.ended, 20)
        answer.check(200)
        assert not num_caught(bench)


async def test_links_that_break_are_no_deaths(store: RedisServer) -> None:
    """The same incarnation is back each time: the request is tried until its attempts are over."""
    async with router_bench(store, max_attempts=4) as bench:
        workers = await add(bench, "d0", "d1", cut_by_poison=True)
        client = await bench.client()
        answer = await client.generate(prompt=POISON)
        assert answer.error is not None
        assert answer.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        assert sum(len(worker.commands("run")) for worker in workers) == 4
        assert not num_caught(bench)
        for worker in workers:
            worker.poison = None
        await until(lambda: all(is_alive(bench, worker) for worker in workers))
        (await client.generate(prompt=POISON)).check(8)


async def test_who_is_on_two_of_many_workers_that_die_is_not_blamed(store: RedisServer) -> None:
    """A rack goes down worker by worker."""
    async with router_bench(store) as bench:
        workers = [await bench.add(f"d{i}", prefill_s=0.3) for i in range(4)]
        client = await bench.client()
        answers = [await client.submit(max_tokens=10) for _ in range(4)]
        await until(lambda: all(worker.commands("run") for worker in workers))
        for worker in workers:
            await worker.die()
        await bench.add("d4")
        await innocent(bench, answers, 10)


@pytest.mark.parametrize("num_equal", [1, 2])
async def test_a_node_that_dies_with_all_its_workers_speaks_against_nobody(
    store: RedisServer, num_equal: int
) -> None:
    """One after another, so that what ran on the first is lost with the second, too. Those that
    held nothing died as well: it was not the request."""
    async with router_bench(store) as bench:
        decode = [await bench.add(f"d{i}", prefill_s=0.3) for i in range(2)]
        prefill = [await bench.add(f"p{i}") for i in range(2)]
        client = await bench.client()
        answers = [await client.submit(prompt=[7] * 20, max_tokens=10) for _ in range(num_equal)]
        await until(lambda: sum(len(worker.commands("run")) for worker in decode) == num_equal)
        for worker in sorted(decode, key=lambda one: not one.commands("run")) + prefill:
            await worker.die()
        await bench.add("d4")
        await innocent(bench, answers, 10)


async def test_two_workers_that_die_one_after_the_other_speak_against_none_of_many(
    store: RedisServer,
) -> None:
    """Those that were on both are tried, and the last one is not guilty for being the last."""
    async with router_bench(store) as bench:
        first = await bench.add("d0", prefill_s=0.3)
        client = await bench.client()
        answers = [await client.submit(num_prompt=40, max_tokens=20) for _ in range(4)]
        await until(lambda: len(first.commands("run")) == 4)
        second = await bench.add("d1", prefill_s=0.3)
        await first.die()
        await until(lambda: len(second.commands("run")) == 4)
        await second.die()
        await bench.add("d2")
        await innocent(bench, answers, 20)


async def test_equal_requests_on_all_workers_of_a_node_that_dies_are_not_blamed(
    store: RedisServer,
) -> None:
    """Each ran on two of them, in turn; so two were not enough to tell."""
    async with router_bench(store) as bench:
        workers = [await bench.add(f"d{i}", prefill_s=1.0) for i in range(4)]
        client = await bench.client()
        answers = [await client.submit(prompt=[7] * 40, max_tokens=20) for _ in range(2)]
        await until(lambda: sum(bool(worker.commands("run")) for worker in workers) == 2)
        for worker in [one for one in workers if one.commands("run")]:
            await worker.die()
        await until(lambda: all(worker.commands("run") for worker in workers))
        for worker in workers:
            if is_alive(bench, worker):
                await worker.die()
        await bench.add("d4")
        await innocent(bench, answers, 20)


async def test_choices_that_lose_their_workers_at_once_count_one_death(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        first = await bench.add("d0", step_s=0.01)
        client = await bench.client()
        answer = await client.submit(num_prompt=100, n=2, max_tokens=300)
        await until(lambda: len(answer.tokens.get(0, ())) > 10)
        both = [await bench.add(f"d{i}", step_s=0.01) for i in (1, 2)]
        await first.die()
        await until(lambda: all(worker.commands("run") for worker in both))
        before = len(answer.tokens[0]), len(answer.tokens[1])
        await until(lambda: all(len(answer.tokens[i]) > before[i] + 10 for i in (0, 1)))
        await asyncio.gather(*(worker.die() for worker in both))
        await bench.add("d3")
        await until(lambda: answer.ended, 20)
        answer.check(300)
        assert not num_caught(bench)


async def test_a_long_stream_outlives_more_workers_than_it_has_attempts(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures that lie behind it, with tokens since, count no more."""
    monkeypatch.setattr(placement, "FORGIVEN_S", 0.0)
    async with router_bench(store, max_attempts=2) as bench:
        client = await bench.client()
        answer: Answer | None = None
        for number in range(4):
            worker = await bench.add(f"d{number}", step_s=0.01)
            answer = answer or await client.submit(max_tokens=200)
            before = len(answer.tokens.get(0, ()))
            await until(lambda: answer.ended or len(answer.tokens.get(0, ())) > before + 10)  # noqa: B023
            await worker.die()
        await bench.add("d4")
        await until(lambda: answer.ended, 20)
        answer.check(200)


async def test_what_a_gateway_was_told_counts_at_the_next_router(store: RedisServer) -> None:
    """Which has workers of the same names, one alive as it was."""
    async with router_bench(store) as bench:
        (first,) = await add(bench, "d0")
        client = await bench.client()
        answer = await client.submit(prompt=POISON)
        await until(lambda: answer.setbacks)
        (setback,) = answer.setbacks
        assert (setback.num_failures, setback.lost.worker_id) == (1, "d0")
        assert setback.lost.incarnation == first.info.incarnation
        await client.cancel(answer)
    async with router_bench(store) as other:
        _, alive = await add(other, "d1", "d2")
        client = await other.client()
        told = {"lost_workers": [setback.lost], "num_failures": 1, "epoch": 1}
        again = await client.generate(prompt=POISON, **told)
        assert again.error is not None and again.error.code == QUARANTINED
        assert num_caught(other) == 1
        running = [w for w in other.workers.values() if is_alive(other, w)]
        assert len(running) == 1 and not running[0].commands("run")
        life = common_pb2.WorkerLife(worker_id="d2", incarnation=alive.info.incarnation)
        harmless = {"lost_workers": [life] * 2, "num_failures": 2, "epoch": 1}
        if alive in running:
            (await client.generate(num_prompt=60, **harmless)).check(8)


async def test_attempts_are_counted_over_all_routers(store: RedisServer) -> None:
    async with router_bench(store, max_attempts=3) as bench:
        worker = await bench.add("d0", fail_with=common_pb2.ERROR_CODE_KV_UNAVAILABLE)
        client = await bench.client()
        answer = await client.generate(num_failures=2, epoch=1)
        assert answer.error is not None and len(worker.commands("run")) == 1
