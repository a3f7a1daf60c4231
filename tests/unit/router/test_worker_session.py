import asyncio

import pytest

from paceline.router.hopes import RECOVERY_S
from paceline.router.links import LAST_SHARE, NODE_COST, ZONE_COST
from paceline.router.pace import MIN_SEEN
from paceline.router.worker_session import OUTBOX_LIMIT, WorkerSession
from paceline.v1 import common_pb2, worker_pb2
from tests.unit.router.listener import Heard


def _session(incarnation: str = "i1") -> WorkerSession:
    return WorkerSession(worker_pb2.WorkerInfo(worker_id="w", incarnation=incarnation), 0.0)


def _paced(step_s: float) -> WorkerSession:
    """After 99 steps of this length."""
    session = _session()
    with session.fly(Heard(), 10) as flight:
        flight.computing = True
        for step in range(1, 100):
            load = worker_pb2.Load(step=step, rounds=step)
            session.handle(worker_pb2.WorkerFrame(load=load), step * step_s)
    return session


def test_llm_d_1950_work_of_an_old_life_never_lands_on_the_new_counters() -> None:
    """https://github.com/llm-d/llm-d/issues/1950: the in-flight counter becomes negative."""
    old, new, heard = _session("i1"), _session("i2"), Heard()
    with old.fly(heard, 100):
        old.lose("closed")
        with new.fly(heard, 50):
            assert (new.num_in_flight, new.pending_tokens) == (1, 50)
        assert (old.num_in_flight, old.pending_tokens) == (1, 100)
    for session in (old, new):
        assert (session.num_in_flight, session.pending_tokens) == (0, 0)
    assert heard.calls == [("error", "unavailable")]


def test_leaving_early_tells_the_worker_unless_it_never_heard_or_has_ended() -> None:
    session, heard = _session(), Heard()
    with session.fly(heard, 1):
        pass
    assert session.outbox.empty()
    with session.fly(heard, 1) as flight:
        flight.send(worker_pb2.WorkerCommand())
    session.outbox.get_nowait()
    assert session.outbox.get_nowait().cancel.slot == flight.slot
    with session.fly(heard, 1) as flight:
        flight.send(worker_pb2.WorkerCommand())
        session.handle(worker_pb2.WorkerFrame(ended_slots=[flight.slot]), 0.0)
    session.outbox.get_nowait()
    assert session.outbox.empty() and heard.calls == [("ended", None)]


def test_a_frame_is_told_in_the_order_that_the_worker_means() -> None:
    session, heard = _session(), Heard()
    with session.fly(heard, 10) as flight:
        frame = worker_pb2.WorkerFrame(ended_slots=[flight.slot])
        frame.errors.add(slot=flight.slot)
        frame.emissions.add(slot=flight.slot, token_ids=[7])
        frame.emissions.add(slot=flight.slot + 1, token_ids=[8])
        session.handle(frame, 0.0)
    assert [name for name, _ in heard.calls] == ["emission", "error", "ended"]
    assert session.num_late == 1


def test_pauses_after_busy_grow_and_end_with_a_reservation() -> None:
    session = _session()
    session.note_busy(0.0)
    assert session.is_busy(0.01) and not session.is_busy(0.03)
    for _ in range(10):
        session.note_busy(1.0)
    assert session.is_busy(1.49) and not session.is_busy(1.51)
    session.handle(worker_pb2.WorkerFrame(reserved=[worker_pb2.Reserved(slot=1)]), 1.0)
    session.note_busy(2.0)
    assert not session.is_busy(2.03)


def test_progress_is_asked_for_only_while_the_worker_should_compute() -> None:
    session, heard = _session(), Heard()
    with session.fly(heard, 10) as flight:
        assert session.check_progress(100.0, 5.0), "nothing to compute yet"
        flight.computing = True
        assert session.check_progress(104.0, 5.0)
        assert not session.check_progress(106.0, 5.0)
        session.handle(worker_pb2.WorkerFrame(load=worker_pb2.Load(rounds=9)), 106.0)
        assert session.check_progress(107.0, 5.0)


def test_a_pool_full_of_pages_that_others_hold_is_no_stall() -> None:
    session, heard = _session(), Heard()
    with session.fly(heard, 10) as flight:
        flight.computing = True
        for second in range(100):
            waiting = worker_pb2.Load(num_running=0, num_waiting=3, rounds=second)
            session.handle(worker_pb2.WorkerFrame(load=waiting), second)
            assert session.check_progress(second, 5.0), "what waits for room makes no steps"
        running = worker_pb2.Load(num_running=1, num_waiting=2, rounds=100)
        session.handle(worker_pb2.WorkerFrame(load=running), 100.0)
        assert session.check_progress(104.9, 5.0)
        assert not session.check_progress(105.1, 5.0), "it runs and does not get on"


def test_a_hung_loop_shows_whatever_the_last_load_said() -> None:
    loads = (worker_pb2.Load(rounds=1), worker_pb2.Load(num_waiting=3, rounds=1))
    for load in loads:
        session, heard = _paced(0.05), Heard()
        start = session.last_round_at
        session.handle(worker_pb2.WorkerFrame(load=load), start)
        with session.fly(heard, 10) as flight:
            flight.send(worker_pb2.WorkerCommand())
            for tenth in range(40):
                session.handle(worker_pb2.WorkerFrame(load=load), start + tenth / 10)
                assert session.check_progress(start + tenth / 10, 10.0)
            assert not session.check_progress(start + 4.1, 10.0), "beats of its front are no excuse"
        assert session.check_progress(start + 4.1, 10.0), "it holds nothing of ours"


def test_a_worker_of_short_steps_is_stuck_sooner_than_one_of_long_ones() -> None:
    for step_s, limit_s in ((0.05, 2.0), (0.5, 5.0), (3.0, 10.0)):
        session, heard = _paced(step_s), Heard()
        start = session.last_round_at
        with session.fly(heard, 10) as flight:
            flight.computing = True
            session.due_since = start
            assert session.check_progress(start + limit_s - 0.1, 10.0)
            assert not session.check_progress(start + limit_s + 0.1, 10.0)


def test_what_waits_is_what_the_worker_told_and_what_it_cannot_have_told() -> None:
    """A prompt that is half computed counts for its half; one on its way counts once."""
    session, heard = _session(), Heard()

    def told(num_waiting_tokens: int) -> int:
        load = worker_pb2.Load(num_waiting_tokens=num_waiting_tokens)
        session.handle(worker_pb2.WorkerFrame(load=load), 1.0)
        return session.num_waiting_tokens

    with session.fly(heard, 1000) as first:
        assert session.num_waiting_tokens == 1000
        assert told(0) == 1000, "the frame and the prompt crossed"
        assert told(600) == 600
        with session.fly(heard, 300):
            assert session.num_waiting_tokens == 900
            assert told(800) == 800, "the frame tells of both"
            first.prompt_done()
            assert told(300) == 300
        assert told(0) == 0
    assert session.num_waiting_tokens == 0


def test_stale_draining_quarantined_and_lost_workers_get_no_work() -> None:
    session = _session()
    assert session.is_usable(1.0, 2.0) and not session.is_usable(2.5, 2.0)
    assert session.can_take(1.0, 2.0, 1, 0) and not session.can_take(2.5, 2.0, 1, 0)
    assert not session.can_take(1.0, 2.0, 0, 0), "no slot"
    assert not session.can_take(1.0, 2.0, 1, 1), "no room"
    session.handle(worker_pb2.WorkerFrame(load=worker_pb2.Load(draining=True)), 3.0)
    assert not session.is_usable(3.0, 2.0) and not session.can_take(3.0, 2.0, 1, 0)
    session.handle(worker_pb2.WorkerFrame(load=worker_pb2.Load()), 3.0)
    session.quarantined_until = 10.0
    assert not session.is_usable(3.0, 2.0) and not session.can_take(3.0, 2.0, 1, 0)
    session.handle(worker_pb2.WorkerFrame(load=worker_pb2.Load(rounds=1)), 3.0)
    assert session.is_usable(3.0, 2.0) and session.can_take(3.0, 2.0, 1, 0)
    session.note_busy(3.0)
    assert session.is_usable(3.0, 2.0) and not session.can_take(3.0, 2.0, 1, 0)
    session.lose("closed")
    assert not session.is_usable(3.0, 2.0) and not session.can_take(3.0, 2.0, 1, 0)


def test_a_worker_that_takes_no_commands_is_lost() -> None:
    session = _session()
    for _ in range(OUTBOX_LIMIT + 1):
        session.send(worker_pb2.WorkerCommand())
    assert session.lost == "outbox"


def _step(session: WorkerSession, step: int, now: float, *slots: int, waiting: int = 0) -> None:
    """A step's frame, with a token for each of `slots`."""
    load = worker_pb2.Load(step=step, rounds=step, num_running=1, num_waiting_tokens=waiting)
    emissions = [common_pb2.Emission(slot=slot, token_ids=[1]) for slot in slots]
    session.handle(worker_pb2.WorkerFrame(load=load, emissions=emissions), now)


def _with_pace(session: WorkerSession, cost_s: float, step_s: float) -> WorkerSession:
    session.cost_s, session.longest_step_s, session._is_paced = cost_s, step_s, True
    return session


def test_a_stream_gains_slack_with_fast_steps_and_a_prompt_takes_it() -> None:
    session, heard = _with_pace(_session(), 1e-3, 0.08), Heard()
    with session.fly(heard, 0) as hoping, session.fly(heard, 0) as silent:
        hoping.hope(0.04)
        assert session.num_hoping == 1
        for number in range(11):
            _step(session, 1 + number, 1.0 + number / 100, hoping.slot, silent.slot)
        session.longest_step_s = 0.08
        never = float("inf")
        assert session.misses(590, 0, 1.1, never) == 0, "0.3 s are half of 0.6"
        assert session.misses(1600, 0, 1.1, never) == pytest.approx(0.5 / RECOVERY_S)
        silent.hope(0.04)
        assert session.misses(1600, 0, 1.1, never) == pytest.approx(2 * 0.5 / RECOVERY_S)
    assert session.num_hoping == 0


def test_a_stream_that_waits_for_its_first_token_has_no_slack_yet() -> None:
    session = _with_pace(_session(), 1e-3, 0.08)
    with session.fly(Heard(), 1000) as flight:
        flight.hope(0.04)
        found = session.misses(1000, 0, 50.0, float("inf"))
    assert found == pytest.approx(0.5 / RECOVERY_S), "its own prompt is ahead, and counts for both"


def test_a_first_token_behind_others_is_late() -> None:
    session = _with_pace(_session(), 1e-3, 0.08)
    assert session.misses(1000, 0, 10.0, 12.0) == 0
    assert session.misses(1000, 0, 10.0, 11.0) == 0.5
    with session.fly(Heard(), 1500):
        assert session.misses(1000, 0, 10.0, 12.0) == 1


def test_who_hopes_for_what_nobody_can_keep_is_placed_like_who_says_nothing() -> None:
    """A first token within 1 ms: an idle worker is no better for that than one with a second of
    prompts, and both cost nothing beside what they cost anyhow."""
    idle, behind = (_with_pace(_session(), 1e-3, 0.1) for _ in range(2))
    with behind.fly(Heard(), 1000):
        at_once, honest = 10.001, 11.0
        found = [s.misses(200, 0, 10.0, at_once, doubt_s=0.001) for s in (idle, behind)]
        assert found == [1, 1]
        assert idle.misses(200, 0, 10.0, honest) < behind.misses(200, 0, 10.0, honest)


def test_a_stream_that_hopes_for_more_than_the_shortest_step_keeps_no_prompt_away() -> None:
    session, heard = _session(), Heard()
    with session.fly(heard, 0) as absurd:
        absurd.hope(0.001)
        absurd.computing = True
        for number in range(1, 20):
            _step(session, number, number / 100, absurd.slot)
        assert session.shortest_step_s == pytest.approx(0.01)
        session.longest_step_s, session.cost_s = 0.08, 1e-3
        assert session.misses(1000, 0, 0.2, float("inf")) == 0
        absurd.hope(0.011)
        assert session.misses(1000, 0, 0.2, float("inf")) > 0


def test_the_pace_is_learned_from_prompts_that_had_nobody_before_them() -> None:
    async def run() -> None:
        session = _session()
        loop = asyncio.get_running_loop()
        with session.fly(Heard(), 1000) as first, session.fly(Heard(), 1000) as second:
            for flight in (first, second):
                flight.compute(worker_pb2.WorkerCommand())
            await asyncio.sleep(0.05)
            for flight in (second, first):
                flight.note_pace(1000, 0)
        assert session.pace._seen == 0, "each had the other beside it"
        for _ in range(MIN_SEEN):
            with session.fly(Heard(), 1000) as flight:
                flight.compute(worker_pb2.WorkerCommand())
                began = loop.time()
                await asyncio.sleep(0.02)
                flight.note_pace(1000, 0)
                took_s = loop.time() - began
        assert session.pace.seconds(1000, 0) == pytest.approx(took_s, rel=0.7)

    asyncio.run(run())


def test_tokens_that_see_many_others_count_for_more_while_they_wait() -> None:
    session = _session()
    session.token_cost, session.pair_cost = 0.9, 5e-5
    with session.fly(Heard(), 100_000, 20_000):
        assert session.num_waiting_tokens == 100_000
        assert session.waiting_cost == pytest.approx(100_000 * (0.9 + 5e-5 * 70_000))
        for step in (1, 2):  # of what was sent before the first it may not tell
            _step(session, step, 1.0, waiting=50_000)
        assert session.waiting_cost == pytest.approx(50_000 * (0.9 + 5e-5 * 70_000))
    _step(session, 3, 2.0)
    assert session.waiting_cost == 0


def _at(zone: str, node: str, worker_id: str = "w") -> WorkerSession:
    info = worker_pb2.WorkerInfo(worker_id=worker_id, incarnation="i", zone=zone, node=node)
    return WorkerSession(info, 0.0)


def _pull_cost(reader: WorkerSession, source: WorkerSession, computed: float) -> float:
    """Of a thousand tokens."""
    found = reader.pull_costs([_at("", "", "none"), source], 1000, [computed, computed])
    return found[1] if found else 0.0


def test_pulls_from_afar_cost_more() -> None:
    here, beside, there = _at("z1", "n1"), _at("z1", "n2", "b"), _at("z2", "n1", "c")
    assert _pull_cost(here, _at("z1", "n1", "a"), 1000) == 0
    assert _pull_cost(here, beside, 1000) == pytest.approx(1000 * NODE_COST)
    assert _pull_cost(here, there, 1000) == pytest.approx(1000 * ZONE_COST)
    assert _pull_cost(here, _at("", "", "d"), 1000) == 0
    assert _pull_cost(_at("", ""), there, 1000) == 0


def test_what_a_worker_measured_of_its_links_counts() -> None:
    reader, source = _session(), _at("", "", "p0")
    source.cost_s = 2e-5
    figures = [worker_pb2.LinkFigure(source="p0", token_us=10.0)]
    reader.handle(worker_pb2.WorkerFrame(links=figures), 1.0)
    reader.handle(worker_pb2.WorkerFrame(load=worker_pb2.Load(step=1)), 1.1)
    assert _pull_cost(reader, source, 1000) == pytest.approx(500 * LAST_SHARE)
    assert _pull_cost(reader, source, 100) == pytest.approx(400 + 100 * LAST_SHARE)
    assert _pull_cost(reader, _at("", "", "p1"), 100) == 0


def test_what_no_link_can_have_is_not_believed() -> None:
    reader, source = _session(), _at("", "", "p0")
    source.cost_s = 2e-5
    for wrong in (float("nan"), float("inf"), -1.0):
        figures = [worker_pb2.LinkFigure(source="p0", token_us=wrong)]
        reader.handle(worker_pb2.WorkerFrame(links=figures), 1.0)
        assert _pull_cost(reader, source, 1000) == 0
