"""Queue, deadlines and cancellation, between real sockets."""

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.core.errors import DeadlineExceeded
from paceline.router.request import Request, WorkerLife
from paceline.v1 import common_pb2
from tests.support.fake_worker import tokens_of
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import Answer, Bench, make_request, router_bench
from tests.support.waits import until


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def test_busy_decode_workers_leave_requests_unprefilled_until_they_are_free(
    store: RedisServer,
) -> None:
    async with router_bench(store) as bench:
        prefill = await bench.add("p0")
        decodes = [await bench.add(name, busy=True) for name in ("d0", "d1")]
        client = await bench.client()
        answers = [await client.submit() for _ in range(10)]
        await until(lambda: all(decode.commands("reserve") for decode in decodes))
        await asyncio.sleep(0.3)
        assert prefill.commands("prefill") == []
        assert sum(len(decode.commands("reserve")) for decode in decodes) < 100, "a storm"
        for decode in decodes:
            decode.busy = False
        await until(lambda: all(answer.ended for answer in answers))
        for answer in answers:
            answer.check(8)
        await bench.check_idle()


async def test_requests_wait_for_pages_that_the_load_report_lacks(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        decode = await bench.add("d0", num_free_pages=2)
        client = await bench.client()
        large, small = await client.submit(num_prompt=100), await client.submit(num_prompt=10)
        await asyncio.sleep(0.3)
        assert decode.commands("run") == [], "the small one must not overtake the large one"
        decode.num_free_pages = 1000
        await until(lambda: large.ended and small.ended)
        lengths = [len(run.request.token_ids) for run in decode.commands("run")]
        assert lengths == [100, 10]


async def test_a_request_larger_than_the_pool_reaches_the_worker_that_refuses_it(
    store: RedisServer,
) -> None:
    async with router_bench(store) as bench:
        code = common_pb2.ERROR_CODE_INVALID_REQUEST
        decode = await bench.add("d0", num_free_pages=10, context_length=20_000, fail_with=code)
        answer = await (await bench.client()).generate(num_prompt=16 * 1001)
        assert answer.error is not None and answer.error.code == code
        assert len(decode.commands("run")) == 1
        await bench.check_idle()


async def test_a_full_queue_refuses_at_once_with_retry_after(store: RedisServer) -> None:
    async with router_bench(store, queue_limit=3, max_slots_per_worker=2) as bench:
        decode = await bench.add("d0", full=True)
        client = await bench.client()
        running = [await client.submit() for _ in range(5)]
        await until(lambda: len(bench.router.coordinator.queue) == 3)
        taken = []
        for _ in range(5):
            started = time.perf_counter()
            refused = await client.generate()
            taken.append(time.perf_counter() - started)
            assert refused.error is not None
            assert refused.error.code == common_pb2.ERROR_CODE_OVERLOADED
            assert refused.error.retry_after_ms >= 1000
        assert min(taken) < 0.05
        decode.full = False
        await until(lambda: all(answer.ended for answer in running))
        for answer in running:
            answer.check(8)
        await bench.check_idle()


async def test_vllm_18826_ten_times_what_fits_is_refused_and_the_rest_served(
    store: RedisServer,
) -> None:
    """https://github.com/vllm-project/vllm/issues/18826: a queue without a bound."""
    async with router_bench(store, queue_limit=8, max_slots_per_worker=4) as bench:
        await bench.add("d0", step_s=0.05)
        client, lengths, answers = await bench.client(), [0], []
        for _ in range(10 * (8 + 4)):
            answers.append(await client.submit(max_tokens=4))
            lengths.append(len(bench.router.coordinator.queue))
        await until(lambda: all(answer.ended for answer in answers))
        refused = [answer.error for answer in answers if answer.error is not None]
        served = [answer for answer in answers if answer.error is None]
        assert max(lengths) <= 8 and len(served) >= 8 + 4 and refused
        for error in refused:
            assert error.code == common_pb2.ERROR_CODE_OVERLOADED and error.retry_after_ms >= 1000
        for answer in served:
            answer.check(4)
        (await client.generate(max_tokens=4)).check(4)
        await bench.check_idle()


async def test_priority_then_arrival(store: RedisServer) -> None:
    async with router_bench(store, max_slots_per_worker=1) as bench:
        decode = await bench.add("d0", full=True)
        client = await bench.client()
        answers = [await client.submit()]
        await until(lambda: decode.commands("run"))
        answers += [await client.submit(max_tokens=2, priority=p) for p in (5, 0, 5, -1)]
        await until(lambda: len(bench.router.coordinator.queue) == 4)
        decode.full = False
        await until(lambda: all(answer.ended for answer in answers))
        seeds = [run.request.sampling.seed for run in decode.commands("run")]
        assert seeds == [1, 5, 3, 2, 4]


async def _in_turn(store: RedisServer, requests: list[dict[str, Any]]) -> list[int]:
    """Numbers of requests, in the order in which they run one by one, once they all wait."""
    async with router_bench(store, max_slots_per_worker=1) as bench:
        decode = await bench.add("d0", full=True)
        client = await bench.client()
        answers = [await client.submit()]
        await until(lambda: decode.commands("run"))
        answers += [await client.submit(max_tokens=2, **fields) for fields in requests]
        await until(lambda: len(bench.router.coordinator.queue) == len(requests))
        decode.full = False
        await until(lambda: all(answer.ended for answer in answers))
        first, *seeds = [run.request.sampling.seed for run in decode.commands("run")]
        return [seed - first - 1 for seed in seeds]


async def test_a_tenant_with_many_requests_does_not_keep_another_waiting(
    store: RedisServer,
) -> None:
    many: list[dict[str, Any]] = [{"tenant": "many"}] * 8
    few: list[dict[str, Any]] = [{"tenant": "few", "tenant_weight": 2.0}] * 4
    order = await _in_turn(store, many + few)
    assert [number for number in order if number < 8] == list(range(8))
    first = order[:6]
    assert len([number for number in first if number >= 8]) == 4, "two of its for one of the other"


async def test_a_priority_counts_for_more_than_a_tenants_share(store: RedisServer) -> None:
    order = await _in_turn(
        store, [{"tenant": "a"}, {"tenant": "b", "priority": -1}, {"tenant": "b", "priority": -1}]
    )
    assert order == [1, 2, 0]


async def test_whose_first_token_is_due_first_goes_first(store: RedisServer) -> None:
    order = await _in_turn(store, [{}, {"ttft_ms": 9000}, {"ttft_ms": 500}, {"budget_ms": 8000}])
    assert order == [2, 3, 1, 0]


async def test_a_millisecond_is_no_way_to_go_before_others(store: RedisServer) -> None:
    """Within a tenant it counts as a tenth of a second, beside other tenants as nothing."""
    hurry: list[dict[str, Any]] = [
        {"ttft_ms": 100},
        {"ttft_ms": 1},
        {"tenant": "other"},
        {"tenant": "third", "ttft_ms": 1},
    ]
    order = await _in_turn(store, hurry)
    assert [number for number in order if number < 2] == [0, 1]
    assert [number for number in order if number >= 2] == [2, 3]


async def test_hopes_that_came_true_and_those_that_did_not_are_counted(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        await bench.add("d0", step_s=0.02)
        client = await bench.client()
        for ttft_ms, itl_ms in ((1e6, 1e6), (0.01, 0.01), (0.01, 1e6), (0, 0)):
            answer = await client.generate(ttft_ms=ttft_ms, itl_ms=itl_ms)
            answer.check(8)
        (await client.generate(max_tokens=1, itl_ms=1e6)).check(1)  # no time between tokens
        await bench.check_idle()
        hopes = bench.router.metrics.hopes
        counted = {
            (hope, kept): hopes.labels(hope, "whole", kept)._value.get()
            for hope in ("ttft", "itl")
            for kept in ("yes", "no")
        }
        expected = {("ttft", "yes"): 1, ("ttft", "no"): 2, ("itl", "yes"): 2, ("itl", "no"): 1}
        assert counted == expected
        await bench.add("p0")
        (await client.generate(ttft_ms=1e6)).check(8)
        await bench.check_idle()
        assert hopes.labels("ttft", "split", "yes")._value.get() == 1


async def test_a_full_queue_is_no_single_tenants(store: RedisServer) -> None:
    async with router_bench(store, queue_limit=4, max_slots_per_worker=1) as bench:
        decode = await bench.add("d0", full=True)
        client = await bench.client()
        first = await client.submit(tenant="many")
        await until(lambda: decode.commands("run"))
        many = [await client.submit(tenant="many") for _ in range(4)]
        await until(lambda: len(bench.router.coordinator.queue) == 4)
        few = [await client.submit(tenant="few") for _ in range(2)]
        await until(lambda: all(answer.ended for answer in many[2:]))
        for refused in many[2:]:
            assert refused.error is not None
            assert refused.error.code == common_pb2.ERROR_CODE_OVERLOADED
            assert refused.error.retry_after_ms >= 1000
        decode.full = False
        served = [first, *many[:2], *few]
        await until(lambda: all(answer.ended for answer in served))
        for answer in served:
            answer.check(8)
        await bench.check_idle()


async def test_who_has_tokens_of_another_router_keeps_its_place_in_a_full_queue(
    store: RedisServer,
) -> None:
    async with router_bench(store, queue_limit=2, max_slots_per_worker=1) as bench:
        decode = await bench.add("d0", full=True)
        client = await bench.client()
        first = await client.submit()
        await until(lambda: decode.commands("run"))
        waiting = [await client.submit() for _ in range(2)]
        await until(lambda: len(bench.router.coordinator.queue) == 2)
        begun = Answer(0, seed=50)
        begun.request = make_request(begun.seed, num_prompt=100, max_tokens=8)
        begun.tokens[0] = tokens_of(begun.seed, 0, 3)
        moved = await client.go_on(begun, epoch=1)
        await until(lambda: len(bench.router.coordinator.queue) == 3)
        urgent = await client.submit(priority=-1)  # all that may be refused give up for it
        await until(lambda: all(answer.ended for answer in waiting))
        decode.full = False
        served = [first, moved, urgent]
        await until(lambda: all(answer.ended for answer in served))
        for answer in served:
            answer.check(8)
        await bench.check_idle()


async def test_work_whose_deadline_passes_in_the_queue_never_starts(store: RedisServer) -> None:
    async with router_bench(store, max_slots_per_worker=1) as bench:
        decode = await bench.add("d0", full=True)
        client = await bench.client()
        running = await client.submit()
        await until(lambda: decode.commands("run"))
        late = await client.generate(budget_ms=100)
        assert late.error is not None
        assert late.error.code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
        decode.full = False
        await until(lambda: running.ended)
        running.check(8)
        assert len(decode.commands("run")) == 1
        await bench.check_idle()


class _Sink:
    """Of a request that is submitted past the wire."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def emit(self, emission: common_pb2.Emission) -> None: ...

    def fail(self, slot: int, error: Exception) -> None:
        self.errors.append(error)

    def set_back(self, slot: int, num_failures: int, lost: WorkerLife | None) -> None: ...


async def test_work_whose_time_is_over_when_its_turn_comes_never_starts(
    store: RedisServer,
) -> None:
    """It has room, and its turn comes before the timer of its deadline can be heard."""
    async with router_bench(store) as bench:
        decode = await bench.add("d0")
        sink, ended = _Sink(), asyncio.Event()
        request = Request(1, make_request(1, 100, 8, budget_ms=1), sink, 60.0)
        bench.router.coordinator.submit(request, ended.set)
        while asyncio.get_running_loop().time() <= request.deadline:
            pass
        await asyncio.wait_for(ended.wait(), 5)
        assert [type(error) for error in sink.errors] == [DeadlineExceeded]
        assert decode.commands("run") == []
        await bench.check_idle()


@pytest.mark.parametrize("names", [("d0",), ("p0", "d0")])
async def test_a_deadline_ends_running_work_everywhere(
    store: RedisServer, names: tuple[str, ...]
) -> None:
    async with router_bench(store) as bench:
        for name in names:
            await bench.add(name, step_s=0.02)
        client = await bench.client()
        answer = await client.generate(max_tokens=1000, budget_ms=600)
        assert answer.tokens and answer.error is not None
        assert answer.error.code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
        await bench.check_idle()
        assert len(bench.workers["d0"].commands("cancel")) == 1


async def test_one_choice_is_cancelled_and_the_others_go_on(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        await bench.add("p0")
        decode = await bench.add("d0", step_s=0.02)
        client = await bench.client()
        answer = await client.submit(n=3, max_tokens=200)
        await until(lambda: len(answer.tokens.get(2, ())) > 2)
        await client.cancel(answer, 1)
        await until(lambda: decode.commands("cancel"))
        decode.step_s = 0.001
        await until(lambda: answer.finished == {0, 2})
        assert [list(c.choices) for c in decode.commands("cancel")] == [[1]]
        assert len(answer.tokens[1]) < 200
        await bench.check_idle()


@pytest.mark.parametrize("num_requests", [200, pytest.param(1000, marks=pytest.mark.slow)])
async def test_vllm_router_215_cancels_at_random_moments_leave_no_load(
    store: RedisServer, num_requests: int
) -> None:
    """https://github.com/vllm-project/router/pull/215: phantom load after cancelled requests."""
    rng = random.Random(0)
    async with router_bench(store) as bench:
        for name in ("p0", "p1", "d0", "d1"):
            await bench.add(name, prefill_s=0.01, handoff_s=0.01)
        client = await bench.client()
        cancelled, kept = await _cancel_storm(bench, rng, num_requests)
        await until(lambda: all(answer.ended for answer in kept), 20)
        for answer in kept:
            answer.check(8)
        await bench.check_idle()
        assert not any(answer.error for answer in cancelled)
        (await client.generate()).check(8)


async def _cancel_storm(
    bench: Bench, rng: random.Random, num_requests: int
) -> tuple[list[object], list[object]]:
    client = await bench.client()
    cancelled, kept = [], []

    async def one(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        answer = await client.submit(num_prompt=rng.choice((20, 200)), n=rng.choice((1, 3)))
        if rng.random() < 0.3:
            cancelled.append(answer)
            await asyncio.sleep(rng.random() * 0.08)
            await client.cancel(answer)
        else:
            kept.append(answer)

    seconds = num_requests / 200
    await asyncio.gather(*(one(seconds * rng.random()) for _ in range(num_requests)))
    return cancelled, kept


@pytest.mark.parametrize("names", [("d0",), ("p0", "d0")])
async def test_a_gateway_that_leaves_ends_its_requests_and_no_others(
    store: RedisServer, names: tuple[str, ...]
) -> None:
    async with router_bench(store, max_slots_per_worker=6) as bench:
        for name in names:
            await bench.add(name, step_s=0.01)
        leaving, staying = await bench.client(), await bench.client()
        kept = await staying.submit(max_tokens=50)
        lost = [await leaving.submit(max_tokens=1000, request_id=f"l{i}") for i in range(8)]
        await until(lambda: any(answer.tokens for answer in lost))
        started = time.perf_counter()
        await leaving.close()
        await until(lambda: bench.router.coordinator.num_in_flight <= 1)
        await until(lambda: bench.workers["d0"].open_slots <= 1)
        assert time.perf_counter() - started < 1.0, "0.25 s on a quiet machine"
        await until(lambda: kept.ended)
        kept.check(50)
        await bench.check_idle()


async def test_drain_finishes_what_runs_and_takes_nothing_new(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        await bench.add("d0", step_s=0.02)
        client = await bench.client()
        running = await client.submit(max_tokens=20)
        await until(lambda: running.tokens)
        drain = asyncio.create_task(bench.router.drain())
        await until(lambda: bench.router.coordinator.draining)
        refused = await client.generate()
        assert refused.error is not None
        assert refused.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        await drain
        running.check(20)


async def test_requests_that_ask_busy_workers_again_keep_their_places_in_the_queue(
    store: RedisServer,
) -> None:
    """While they ask nobody waits, and others would be let in, again and again."""
    async with router_bench(store, queue_limit=4) as bench:
        await bench.add("p0")
        decode = await bench.add("d0", busy=True)
        client = await bench.client()
        answers = []
        for _ in range(500):
            answers.append(await client.submit())
            await asyncio.sleep(0.004)
        await until(lambda: sum(not answer.ended for answer in answers) <= 6)
        decode.busy = False
        await until(lambda: all(answer.ended for answer in answers), 10)
        served = [answer for answer in answers if answer.error is None]
        assert 4 <= len(served) <= 6
        for answer in served:
            answer.check(8)
        assert not bench.router.coordinator.queue.num_asking
        await bench.check_idle()


async def test_a_request_that_runs_after_a_worker_was_busy_keeps_no_place_in_the_queue(
    store: RedisServer,
) -> None:
    async with router_bench(store) as bench:
        prefill = await bench.add("p0")
        decode = await bench.add("d0", busy=True, step_s=0.02)
        client = await bench.client()
        answer = await client.submit(max_tokens=60)
        await until(lambda: decode.commands("reserve"))
        await prefill.die()  # so that it runs whole, without a reservation
        await until(lambda: answer.tokens.get(0))
        assert not bench.router.coordinator.queue.num_asking
        assert not answer.ended
        await until(lambda: answer.ended)
        answer.check(60)
        await bench.check_idle()
