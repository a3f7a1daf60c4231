"""Workers that die, stall, lie or come back: the client sees the tokens of an undisturbed run."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from paceline.v1 import common_pb2, worker_pb2
from tests.support.fake_worker import token_at
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import Answer, Bench, router_bench
from tests.support.waits import until

_FAST = {"beat_s": 0.2, "dead_after_s": 0.6, "stall_after_s": 0.6, "handoff_timeout_s": 0.4}


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


async def _finish(bench: Bench, answers: list[Answer], num_tokens: int) -> None:
    await until(lambda: all(answer.ended for answer in answers), 15)
    for answer in answers:
        answer.check(num_tokens)
    await bench.check_idle()


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("phase", ["reserve", "prefill", "handoff", "decode"])
async def test_a_death_in_any_phase_costs_no_token(
    store: RedisServer, victim: str, phase: str
) -> None:
    """Both workers of the other pair get the request when one of the first pair dies."""
    async with router_bench(store, **_FAST) as bench:
        prefill = await bench.add("p0", prefill_s=0.2 if phase == "prefill" else 0)
        decode = await bench.add("d0", handoff_s=0.2 if phase == "handoff" else 0, step_s=0.01)
        decode.deaf_to_adopt = phase == "reserve"
        others = [await bench.prepare("p1"), await bench.prepare("d1", step_s=0.01)]
        client = await bench.client()
        answers = [await client.submit(n=n, max_tokens=30) for n in (1, 1, 3)]
        reached = {
            "reserve": lambda: decode.commands("reserve"),
            "prefill": lambda: len(prefill.commands("prefill")) == 3,
            "handoff": lambda: all(answer.tokens for answer in answers),
            "decode": lambda: all(len(answer.tokens.get(0, ())) > 5 for answer in answers),
        }
        await until(reached[phase])
        await bench.workers[victim].die()
        await asyncio.gather(*map(bench.admit, others))
        await _finish(bench, answers, 30)
        if (victim, phase) == ("d0", "decode"):
            assert max(answer.longest_pause_s for answer in answers) < 1.0
            forced = [r.request for r in others[1].commands("reserve")]
            assert all(len(r.token_ids) > r.num_prompt_tokens == 100 for r in forced)


async def test_repeated_deaths_of_one_decode_worker(store: RedisServer) -> None:
    async with router_bench(store, **_FAST, max_attempts=8) as bench:
        decode = await bench.add("d0", die_after=10)
        client = await bench.client()
        answer = await client.submit(max_tokens=60)
        for deaths in range(1, 4):
            await until(lambda: decode.die_after is None)
            decode.die_after = 10 * (deaths + 1) if deaths < 3 else None
            await decode.start()
        await _finish(bench, [answer], 60)


async def test_death_while_several_choices_run_continues_each_by_itself(
    store: RedisServer,
) -> None:
    async with router_bench(store, **_FAST) as bench:
        await bench.add("d0", step_s=0.02)
        client = await bench.client()
        answer = await client.submit(n=4, max_tokens=30)
        await until(lambda: len(answer.tokens.get(3, ())) > 3)
        await bench.workers["d0"].die()
        survivor = await bench.add("d1")
        await _finish(bench, [answer], 30)
        runs = [list(run.request.choices) for run in survivor.commands("run")]
        assert sorted(runs) == [[0], [1], [2], [3]]
        assert all(run.request.sampling.n == 4 for run in survivor.commands("run"))


@pytest.mark.parametrize("victim", ["p0", "d0"])
@pytest.mark.parametrize("fault", ["silent", "stalled"])
async def test_a_worker_that_stops_is_left_behind(
    store: RedisServer, victim: str, fault: str
) -> None:
    async with router_bench(store, **_FAST) as bench:
        await bench.add("p0", prefill_s=0.1)
        await bench.add("d0", step_s=0.01)
        client = await bench.client()
        answer = await client.submit(max_tokens=60)
        if victim == "d0":
            await until(lambda: len(answer.tokens.get(0, ())) > 5)
        else:
            await until(lambda: bench.workers["p0"].commands("prefill"))
        setattr(bench.workers[victim], fault, True)
        await bench.add("p1")
        await bench.add("d1", step_s=0.01)
        await until(lambda: answer.ended, 10)
        answer.check(60)
        assert answer.longest_pause_s < 3


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_worker_that_hangs_with_all_its_work_waiting_is_left_behind(
    store: RedisServer, victim: str
) -> None:
    """Its last word, that all waits for room, does not excuse it for ever."""
    async with router_bench(store, **_FAST) as bench:
        await bench.add("p0")
        await bench.add("d0")
        worker = bench.workers[victim]
        worker.full = True
        client = await bench.client()
        answers = [await client.submit(max_tokens=10) for _ in range(3)]
        kind = "prefill" if victim == "p0" else "adopt"
        await until(lambda: len(worker.commands(kind)) == 3)
        await asyncio.sleep(0.3)  # it has said so
        worker.stalled = True
        await bench.add("p1")
        await bench.add("d1")
        started = time.perf_counter()
        await until(lambda: all(answer.ended for answer in answers), 5)
        assert time.perf_counter() - started < 2.0  # of which 0.6 s are `stall_after_s`
        for answer in answers:
            answer.check(10)


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_long_step_of_a_loop_that_gets_on_is_waited_for(
    store: RedisServer, victim: str
) -> None:
    async with router_bench(store, **_FAST) as bench:
        await bench.add("p0")
        await bench.add("d0", step_s=0.01)
        client = await bench.client()
        await client.generate(max_tokens=10)  # its pace is known
        bench.workers[victim].prefill_s = 1.5  # more than twice `stall_after_s`
        num_prompt = 100 if victim == "p0" else 20
        answers = [await client.submit(num_prompt, max_tokens=10) for _ in range(3)]
        await _finish(bench, answers, 10)
        assert not bench.router.metrics.replans.labels("unavailable")._value.get()


async def test_a_pool_that_readers_hold_is_waited_for(store: RedisServer) -> None:
    async with router_bench(store, **_FAST) as bench:
        prefill = await bench.add("p0", full=True)
        await bench.add("d0")
        client = await bench.client()
        answers = [await client.submit(max_tokens=10) for _ in range(3)]
        await until(lambda: len(prefill.commands("prefill")) == 3)
        await asyncio.sleep(1.5)  # more than twice `stall_after_s`
        prefill.full = False
        await _finish(bench, answers, 10)
        assert len(prefill.commands("prefill")) == 3
        assert bench.router.metrics.replans.labels("unavailable")._value.get() == 0


async def test_a_wait_for_a_place_in_the_batch_is_no_failed_hand_off(store: RedisServer) -> None:
    async with router_bench(store, **_FAST) as bench:
        await bench.add("p0")
        decode = await bench.add("d0", full=True)
        client = await bench.client()
        answer = await client.submit(max_tokens=10)
        await until(lambda: decode.commands("adopt"))
        await asyncio.sleep(1.2)  # three times `handoff_timeout_s`
        decode.full = False
        await _finish(bench, [answer], 10)
        assert len(decode.commands("adopt")) == 1


async def test_prefill_is_let_go_by_the_first_token_of_decode(store: RedisServer) -> None:
    """Whether or not the reader's word to the source arrives."""
    async with router_bench(store) as bench:
        prefill = await bench.add("p0", holds=True)
        decode = await bench.add("d0", step_s=0.02)
        client = await bench.client()
        answer = await client.submit(max_tokens=100)
        await until(lambda: len(answer.tokens.get(0, ())) > 2)
        await until(lambda: not prefill.open_slots)
        assert decode.open_slots and len(prefill.commands("cancel")) == 1
        await client.cancel(answer)
        await bench.check_idle()


async def test_leases_of_a_dead_reader_are_revoked_at_once(store: RedisServer) -> None:
    async with router_bench(store, **_FAST) as bench:
        prefill = await bench.add("p0", holds=True)
        decode = await bench.add("d0", deaf_to_adopt=True)
        client = await bench.client()
        answer = await client.submit(max_tokens=10)
        await until(lambda: answer.tokens)
        await decode.die()
        await until(lambda: prefill.commands("revoke"))
        ticket, revoke = prefill.commands("prefill")[0].ticket, prefill.commands("revoke")[0]
        assert (revoke.request_id, revoke.attempt) == (ticket.request_id, ticket.attempt)
        await bench.add("d1")
        await _finish(bench, [answer], 10)
        assert len(prefill.commands("revoke")) == 1


async def test_a_decode_worker_silent_after_the_first_token(store: RedisServer) -> None:
    async with router_bench(store, **{**_FAST, "handoff_timeout_s": 1.0}) as bench:
        await bench.add("p0")
        await bench.add("d0", deaf_to_adopt=True)
        other = await bench.prepare("d1")
        client = await bench.client()
        answer = await client.submit(max_tokens=10)
        await until(lambda: answer.tokens)
        await bench.admit(other)
        await _finish(bench, [answer], 10)
        reasons = bench.router.metrics.replans.labels("kv_unavailable")
        assert reasons._value.get() == 1


@pytest.mark.parametrize(
    "code",
    [
        common_pb2.ERROR_CODE_KV_UNAVAILABLE,
        common_pb2.ERROR_CODE_INTERNAL,
        common_pb2.ERROR_CODE_UNAVAILABLE,
        common_pb2.ERROR_CODE_INCOMPATIBLE_PEER,
    ],
)
@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_failed_hand_off_is_planned_again(
    store: RedisServer, code: common_pb2.ErrorCode, victim: str
) -> None:
    async with router_bench(store, **_FAST) as bench:
        await bench.add("p0")
        await bench.add("d0")
        bench.workers[victim].fail_with = code
        client = await bench.client()
        answers = [await client.submit(max_tokens=10, n=n) for n in (1, 2)]
        await until(lambda: bench.router.metrics.replans.labels(_label(code))._value.get())
        bench.workers[victim].fail_with = None
        await _finish(bench, answers, 10)


async def test_attempts_are_bounded_and_the_last_error_names_nobody(store: RedisServer) -> None:
    async with router_bench(store, max_attempts=3) as bench:
        decode = await bench.add("d0", fail_with=common_pb2.ERROR_CODE_KV_UNAVAILABLE)
        client = await bench.client()
        answer = await client.generate()
        assert len(decode.commands("run")) == 3
        assert answer.error is not None and answer.num_ends == 1
        assert answer.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        assert "127.0.0.1" not in answer.error.message and "d0" not in answer.error.message
        await bench.check_idle()


async def test_no_worker_for_long_is_said_at_once_and_at_first_waited_for(
    store: RedisServer,
) -> None:
    async with router_bench(store, worker_wait_s=0.3) as bench:
        decode = await bench.add("d0")
        client = await bench.client()
        started = time.perf_counter()
        await decode.die()
        await until(lambda: not any(bench.router.fleet.sessions()))
        first = await client.generate()
        assert first.error is not None and time.perf_counter() - started > 0.3
        assert first.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        taken = []
        for _ in range(5):
            started = time.perf_counter()
            second = await client.generate()
            taken.append(time.perf_counter() - started)
            assert second.error is not None and second.error.retry_after_ms > 0
        assert min(taken) < 0.05
        await bench.check_idle()


async def test_a_worker_that_comes_up_takes_its_part_of_what_waits_elsewhere(
    store: RedisServer,
) -> None:
    """Of a line of nine at one worker every other one, and nothing that has begun."""
    async with router_bench(store) as bench:
        crowded = await bench.add("d0")
        client = await bench.client()
        running = await client.submit(max_tokens=500)
        await until(lambda: running.tokens)
        crowded.full = True
        waiting = [await client.submit(num_prompt=400, max_tokens=8) for _ in range(9)]
        session = bench.router.fleet.links["d0"].session
        assert session is not None
        await until(lambda: session.load.num_waiting == 10)
        came = await bench.add("d1")
        await until(lambda: len(came.commands("run")) == 4)
        taken = [run.request.request_id for run in came.commands("run")]
        assert taken == [answer.request.request_id for answer in waiting[1::2]]
        crowded.full = False
        await until(lambda: running.ended, 20)
        running.check(500)
        await _finish(bench, waiting, 8)


async def test_requests_wait_for_the_only_decode_worker_to_come_back(store: RedisServer) -> None:
    async with router_bench(store, worker_wait_s=20) as bench:
        decode = await bench.add("d0", step_s=0.02)
        client = await bench.client()
        running = await client.submit(max_tokens=30)
        await until(lambda: running.tokens)
        await decode.die()
        await until(lambda: bench.router.reasons())
        assert bench.router.reasons() == ["no decode worker is connected"]
        await until(lambda: client.models[0].unavailable)
        late = await client.submit(max_tokens=8)
        hurried = await client.submit(max_tokens=8, budget_ms=200)
        await until(lambda: hurried.ended)
        assert hurried.error is not None
        assert hurried.error.code == common_pb2.ERROR_CODE_DEADLINE_EXCEEDED
        assert not running.ended and not late.ended
        await bench.add("d0")
        await _finish(bench, [running], 30)
        await _finish(bench, [late], 8)
        assert bench.router.reasons() == []
        assert not client.models[0].unavailable


async def test_frames_of_slots_that_ended_and_false_positions_change_nothing(
    store: RedisServer,
) -> None:
    async with router_bench(store) as bench:
        decode = await bench.add("d0", step_s=0.02)
        client = await bench.client()
        answer = await client.submit(max_tokens=30)
        await until(lambda: len(answer.tokens.get(0, ())) > 5)
        slot = decode.commands("run")[0].slot
        frame = worker_pb2.WorkerFrame()
        frame.emissions.add(slot=slot + 7, choice=0, position=3, token_ids=[1, 2])  # unknown slot
        frame.emissions.add(slot=slot, choice=0, position=0, token_ids=[4, 4])  # long past
        frame.emissions.add(slot=slot, choice=9, position=0, token_ids=[4])  # no such choice
        overlap = [99, token_at(answer.seed, 0, len(answer.tokens[0]))]
        frame.emissions.add(
            slot=slot, choice=0, position=len(answer.tokens[0]) - 1, token_ids=overlap
        )
        frame.ended_slots.append(slot + 8)
        decode.inject(frame)
        await until(lambda: answer.ended)
        answer.check(30)
        await bench.check_idle()


async def test_a_gap_in_positions_costs_the_attempt(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        decode = await bench.add("d0", step_s=0.02)
        client = await bench.client()
        answer = await client.submit(max_tokens=30)
        await until(lambda: len(answer.tokens.get(0, ())) > 5)
        frame = worker_pb2.WorkerFrame()
        slot = decode.commands("run")[0].slot
        frame.emissions.add(slot=slot, choice=0, position=25, token_ids=[1])
        decode.inject(frame)
        await _finish(bench, [answer], 30)
        assert len(decode.commands("run")) == 2
        assert [cancel.slot for cancel in decode.commands("cancel")] == [slot]


async def test_decode_heard_before_the_first_token_waits_for_it(store: RedisServer) -> None:
    async with router_bench(store) as bench:
        prefill = await bench.add("p0", prefill_s=0.2)
        decode = await bench.add("d0")
        client = await bench.client()
        answer = await client.submit(max_tokens=10)
        await until(lambda: prefill.commands("prefill"))
        prefill.cluster.handoff(prefill.commands("prefill")[0].ticket).set()
        await _finish(bench, [answer], 10)
        assert (len(prefill.commands("prefill")), len(decode.commands("adopt"))) == (1, 1)


async def test_smg_2382_restarted_peers_get_work_again_under_their_new_incarnation(
    store: RedisServer,
) -> None:
    """https://github.com/smg-project/smg/issues/2382: stale peer state after a restart."""
    async with router_bench(store, **_FAST) as bench:
        prefill = await bench.add("p0")
        decodes = [await bench.add(f"d{i}", step_s=0.01) for i in range(4)]
        client = await bench.client()
        running = [await client.submit(max_tokens=20) for _ in range(8)]
        await until(lambda: all(answer.tokens for answer in running))
        for decode in decodes:
            await decode.die()
        for decode in decodes:
            await decode.start()
        await asyncio.gather(*(bench.up(decode) for decode in decodes))
        started = time.perf_counter()
        fresh = [await client.submit(max_tokens=5) for _ in range(50)]
        await until(lambda: all(answer.ended for answer in fresh))
        assert time.perf_counter() - started < 5
        for answer in fresh:
            answer.check(5)
        await _finish(bench, running, 20)
        current = {decode.info.incarnation for decode in decodes}
        tickets = [p.ticket for p in prefill.commands("prefill") if p.request.token_ids[100:] == []]
        assert {ticket.reader_incarnation for ticket in tickets[-50:]} <= current


def _label(code: common_pb2.ErrorCode) -> str:
    return common_pb2.ErrorCode.Name(code).removeprefix("ERROR_CODE_").lower()
