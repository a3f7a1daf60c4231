"""Plans, and what they add up to over many requests (simulated workers, virtual time)."""

import random
import statistics
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.router.links import seen_cost
from paceline.router.planner import (
    MAX_WEIGHED,
    MISS_TOKENS,
    Candidate,
    Job,
    Split,
    Whole,
    has_room,
    plan,
)
from paceline.v1 import worker_pb2
from tests.support.simulated_workers import Simulation, plan_among

_RNG = random.Random(0)
_P0, _P1 = Candidate("p0", True), Candidate("p1", True)
_D0, _D1 = Candidate("d0", False), Candidate("d1", False)


def test_long_prompts_are_split_and_short_ones_are_not() -> None:
    assert plan_among(Job(33, 8), [_P0, _D0], _RNG) == Split(_P0, _D0)
    assert plan_among(Job(32, 8), [_P0, _D0], _RNG) == Whole(_D0)
    warm = _D0._replace(num_cached_tokens=480)
    assert plan_among(Job(500, 8), [_P0, warm], _RNG) == Whole(warm)


def test_without_prefill_workers_decode_does_it_all() -> None:
    assert plan_among(Job(500, 8), [_D0], _RNG) == Whole(_D0)
    assert plan_among(Job(500, 8, may_split=False), [_P0, _D0], _RNG) == Whole(_D0)


def test_prefill_workers_alone_serve_single_tokens_only() -> None:
    assert plan_among(Job(500, 1), [_P0], _RNG) == Whole(_P0)
    assert plan_among(Job(500, 2), [_P0], _RNG) is None
    assert plan_among(Job(500, 2), [], _RNG) is None


def test_who_failed_before_is_the_last_resort() -> None:
    job = Job(500, 8, avoid=frozenset({"p0", "d0"}))
    for _ in range(20):
        assert plan_among(job, [_P0, _P1, _D0, _D1], _RNG) == Split(_P1, _D1)
    assert plan_among(job, [_P0, _D0], _RNG) == Split(_P0, _D0)


def test_decode_workers_without_room_are_passed_over() -> None:
    full = _D0._replace(num_free_pages=10, num_pages=100)
    assert plan_among(Job(160, 8), [_P0, full, _D1], _RNG) == Split(_P0, _D1)
    assert plan_among(Job(160, 8), [_P0, full], _RNG) is None
    assert plan_among(Job(16 * 100, 8), [_P0, full], _RNG) == Split(_P0, full), "it must refuse"


def test_room_is_counted_by_page_group() -> None:
    """Where a window slides a long prompt needs no more pages than the window."""
    windowed = _D0._replace(num_pages=500, num_free_pages=120, most_pages=(0, 20, 20))
    assert plan_among(Job(16 * 78, 8), [_P0, windowed], _RNG) == Split(_P0, windowed)
    assert plan_among(Job(16 * 81, 8), [_P0, windowed], _RNG) is None
    full = windowed._replace(most_pages=(0, 0, 0))
    assert plan_among(Job(16 * 40, 8), [_P0, full], _RNG) is None


def test_the_longest_cached_prefix_wins_unless_its_worker_is_loaded() -> None:
    warm = _D1._replace(num_cached_tokens=400)
    loaded = warm._replace(num_waiting_tokens=1000)
    job = Job(500, 8)
    many = [Candidate(f"d{i}", False) for i in range(2, 10)]
    for _ in range(50):
        assert plan_among(job, [*many, warm], _RNG) == Whole(warm)
        assert plan_among(job, [*many, loaded], _RNG) != Whole(loaded)


def test_equal_workers_are_drawn_by_lot() -> None:
    drawn = Counter(str(plan_among(Job(100, 8), [_D0, _D1], _RNG)) for _ in range(400))
    assert len(drawn) == 2 and min(drawn.values()) > 150


class _Streams(Candidate):
    """With streams that a prompt makes miss what they hope for, a thousandth a token."""

    def misses(
        self, num_new: int, num_cached: int, now: float, due: float, doubt_s: float
    ) -> float:
        return self.num_hoping * num_new / 1000


def test_hopes_count_for_more_than_what_is_cached() -> None:
    warm, cold = _Streams("d0", False, 900, num_hoping=3), _Streams("d1", False)
    for _ in range(20):
        assert plan_among(Job(1000, 8), [warm, cold], _RNG) == Whole(cold)
        assert plan_among(Job(1000, 8), [warm._replace(num_hoping=0), cold], _RNG) == Whole(
            warm._replace(num_hoping=0)
        )


def test_hopes_are_asked_of_the_cheapest_alone() -> None:
    near = [_Streams(f"d{i}", False, num_running=1, num_hoping=1) for i in range(MAX_WEIGHED)]
    far = _Streams("far", False, num_waiting_tokens=5000)
    found = plan_among(Job(2000, 8), [far, *near], _RNG)
    assert isinstance(found, Whole) and found.worker in near
    taken, cost = found.considered[0]
    assert taken == found.worker and cost.misses == 2 * MISS_TOKENS
    assert cost.running == 32 + 2000 / 20, "half of what a stream without a hope counts"
    assert cost.total == pytest.approx(2132 + 2 * MISS_TOKENS)


def test_pulls_cost_no_stream_its_hope() -> None:
    reader = _Streams("d0", False, num_hoping=5)
    found = plan_among(Job(1000, 8), [_P0, reader, _D1._replace(num_running=1)], _RNG)
    assert found == Split(_P0, reader)


class _Reader(Candidate):
    """Over whose links a token costs what the source's name says."""

    def pull_costs(
        self, sources: Sequence[Candidate], num_tokens: int, computed: Sequence[float]
    ) -> list[float]:
        costs = [float(source.worker_id) for source in sources]
        pairs = zip(costs, computed, strict=True)
        return [seen_cost(num_tokens * cost, while_pulled) for cost, while_pulled in pairs]


def test_decode_pulls_over_the_faster_link_unless_its_source_is_loaded() -> None:
    reader, fast, slow = _Reader("d0", False), Candidate("0.1", True), Candidate("3", True)
    found = plan_among(Job(1000, 8), [fast, slow, reader], _RNG)
    assert found == Split(fast, reader)
    assert found.considered[0][1].pull == 100 / 16
    assert found.considered[1][1].pull == 2000 + 1000 / 16
    assert found.considered[0][1].total == pytest.approx(1000 + 100 / 16)
    loaded = fast._replace(num_waiting_tokens=2500)
    assert plan_among(Job(1000, 8), [loaded, slow, reader], _RNG) == Split(slow, reader)


def test_a_slow_worker_is_taken_when_the_others_have_more_to_do() -> None:
    slow = _D0._replace(token_cost=3.0)
    busy = _D1._replace(num_waiting_tokens=1500)
    assert plan_among(Job(1000, 8), [slow, busy], _RNG) == Whole(busy)
    busy = _D1._replace(num_waiting_tokens=2500)
    assert plan_among(Job(1000, 8), [slow, busy], _RNG) == Whole(slow)


def test_tokens_behind_a_long_cached_prefix_cost_more_than_as_many_alone() -> None:
    far = _D0._replace(pair_cost=1e-4, num_cached_tokens=50_000)
    near = _D1._replace(pair_cost=1e-4, num_waiting_tokens=49_000)
    assert plan_among(Job(60_000, 8), [far, near], _RNG) == Whole(far)
    assert plan_among(Job(60_000, 8), [far], _RNG).considered[0][1].uncached == (  # type: ignore[union-attr]
        pytest.approx(10_000 * (1 + 1e-4 * 55_000))
    )


_workers = st.builds(
    Candidate,
    worker_id=st.uuids().map(str),
    is_prefill=st.booleans(),
    num_cached_tokens=st.integers(0, 999),
    num_waiting_tokens=st.integers(0, 20_000),
    unreported_tokens=st.integers(0, 5000),
    num_running=st.integers(0, 40),
    num_free_pages=st.integers(0, 200),
    num_pages=st.just(200),
    recent_requests=st.floats(0, 100),
    token_cost=st.floats(0.1, 8),
    pair_cost=st.floats(0, 1e-3),
    num_hoping=st.integers(0, 3),
)
_fleets = st.lists(_workers, min_size=1, max_size=12, unique_by=lambda c: c.worker_id)
_others = st.sampled_from([0.0, 0.5, 2.0])


@given(_fleets, _others, st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_a_plan_keeps_to_the_room_and_follows_from_the_seed(
    fleet: list[Candidate], others: float, seed: int
) -> None:
    job = Job(1000, 8, others=others)
    found = plan_among(job, fleet, random.Random(seed))
    assert found == plan_among(job, fleet, random.Random(seed))
    fits = [c for c in fleet if not c.is_prefill and has_room(c, job)]
    assert (found is None) == (not fits)
    if found is not None:
        assert (found.decode if isinstance(found, Split) else found.worker) in fits


@given(_fleets, _workers, st.integers(1, 999), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_who_is_chosen_stays_chosen_when_it_holds_more(
    fleet: list[Candidate], roomy: Candidate, more: int, seed: int
) -> None:
    """By the same lots. Whole plans alone: a worker that holds nearly all may end a split."""
    roomy = roomy._replace(worker_id="roomy", num_free_pages=200)  # so one is always chosen
    fleet = [candidate._replace(is_prefill=False) for candidate in [*fleet, roomy]]
    plan = plan_among(Job(1000, 8), fleet, random.Random(seed))
    assert isinstance(plan, Whole)
    chosen = plan.worker
    warmer = chosen._replace(num_cached_tokens=min(999, chosen.num_cached_tokens + more))
    fleet[fleet.index(chosen)] = warmer
    found = plan_among(Job(1000, 8), fleet, random.Random(seed))
    assert isinstance(found, Whole)
    assert found.worker == warmer or found.worker.num_running <= warmer.num_running


def test_infera_103_paced_sessions_use_both_workers() -> None:
    """https://github.com/AMD-AGI/Infera/pull/103: 448 requests to one worker, 0 to its twin."""
    for seed in range(2):
        simulation = Simulation(2, seed=seed)
        common = list(range(2000))
        last: dict[int, str] = {}
        same = 0
        for number in range(448):
            session, turn = number % 16, number // 16
            history = [10_000 + session] * (16 + 64 * turn)
            worker = simulation.start(common + history)
            same += last.get(session, worker) == worker
            last[session] = worker
            while simulation.advance():
                pass
        served = [worker.num_served for worker in simulation.workers.values()]
        assert max(served) <= 0.6 * 448, served
        assert same >= 0.9 * 448


def _closed_loop(simulation: Simulation) -> float:
    """64 at once, a shared prefix of 1500 and 200 of their own; max over mean of running."""
    unique = iter(range(10**9))
    common = list(range(1500))
    ratios = []
    for _ in range(64):
        simulation.start(common + [next(unique) + 5000] * 200)
    for number in range(1500):
        before = sum(worker.num_running for worker in simulation.workers.values())
        simulation.advance()
        running = [worker.num_running for worker in simulation.workers.values()]
        if sum(running) < before:
            simulation.start(common + [next(unique) + 5000] * 200, 80 + number % 40)
        if number > 500:
            ratios.append(max(running) / statistics.mean(running))
    return statistics.mean(ratios)


def test_dynamo_737_a_shared_system_prompt_does_not_gather_the_load() -> None:
    """https://github.com/ai-dynamo/dynamo/issues/737: all of it lands on 1 of 8 workers."""
    ours = Simulation(8)
    assert _closed_loop(ours) <= 1.3
    least = Simulation(8, policy=lambda job, them: min(them, key=lambda c: c.num_running))
    _closed_loop(least)
    p99 = [statistics.quantiles(s.ttfts[500:], n=100)[98] for s in (ours, least)]
    assert p99[0] <= 1.2 * p99[1]


def _load_all_but(simulation: Simulation, idle: str) -> None:
    for name, worker in simulation.workers.items():
        waiting = 0 if name == idle else 6000
        load = worker_pb2.Load(num_waiting_tokens=waiting, num_free_pages=9999, num_pages=9999)
        worker.session.handle(worker_pb2.WorkerFrame(load=load), 0.0)


@pytest.mark.parametrize("num_tokens", [500, 1000, 4000])
@pytest.mark.parametrize("num_routers", [3, 16])
def test_dynamo_589_many_routers_do_not_all_pick_the_idle_worker(
    num_routers: int, num_tokens: int
) -> None:
    """https://github.com/ai-dynamo/dynamo/issues/589: one metrics period, the same best worker.

    Together they send the idle one about what it lacks, 6000 tokens, and not 10 requests each.
    """
    sent = []
    for trial in range(6):
        idle = 0
        for router in range(num_routers):
            others = num_routers - 1.0
            simulation = Simulation(8, seed=1000 * trial + router, others=others)
            _load_all_but(simulation, "d3")
            for number in range(10):
                tokens = [trial, router, number] * (num_tokens // 3)
                idle += simulation.start(tokens) == "d3"
        sent.append(idle)
    fair = num_routers * 10 / 8
    lacking = 6000 / num_tokens
    assert min(sent) >= 1, "it is idle, after all"
    assert max(sent) <= max(num_routers, 2 * lacking) + fair


@pytest.mark.parametrize("num_workers", [4, 64])
def test_routers_side_by_side_do_not_choose_alike(num_workers: int) -> None:
    """Three that see the same load, but for small differences, for each of their next requests."""
    chance = random.Random(5)
    alike = 0
    for trial in range(200):
        fleet = [
            Candidate(f"d{i}", False, num_waiting_tokens=chance.randrange(500), num_running=5)
            for i in range(num_workers)
        ]
        job = Job(2000, 8, others=2.0)
        chosen = {str(plan_among(job, fleet, random.Random(3 * trial + i))) for i in range(3)}
        alike += len(chosen) == 1
    assert alike <= 200 * 0.25
    alone = {str(plan_among(Job(2000, 8), fleet, random.Random(i))) for i in range(20)}
    assert len(alone) <= 1 + num_workers // 8, "one router alone takes the best"


def test_sglang_14305_cache_misses_avoid_the_overloaded_worker() -> None:
    """https://github.com/sgl-project/sglang/pull/14305: misses go to the smallest cache tree."""
    simulation = Simulation(2)
    for number in range(200):  # a large tree on d1
        simulation.index.store(simulation.workers["d1"].view, number.to_bytes(16, "little"))
    for _ in range(30):
        session = simulation.workers["d0"].session
        session.load.num_waiting_tokens += 3000
        session.load.num_running += 1
    chosen = [simulation.start([50_000 + number] * 100) for number in range(50)]
    assert chosen.count("d1") >= 45


def test_one_that_is_both_computes_what_it_decodes_or_what_another_does() -> None:
    both, decode = Candidate("b0", is_prefill=False), Candidate("d0", is_prefill=False)
    job = Job(1000, 8)

    def planned(both: Candidate, decode: Candidate) -> Whole | Split | None:
        return plan(job, [both], [both, decode], {}, 32, _RNG)

    busy = decode._replace(num_running=20)
    assert planned(both, busy) == Whole(both), "no KV is handed over from it to itself"
    found = planned(both._replace(num_running=20), decode)
    assert isinstance(found, Split)
    assert (found.prefill.worker_id, found.decode.worker_id) == ("b0", "d0")
    sides = [(one.worker_id, one.is_prefill) for one, _ in found.considered]
    assert sides[0] == ("b0", True) and ("b0", False) in sides[1:]


def test_one_that_is_both_is_looked_at_once_for_a_single_token() -> None:
    both = Candidate("b0", is_prefill=False)
    found = plan(Job(1000, 1), [both], [both], {}, 32, _RNG)
    assert isinstance(found, Whole) and len(found.considered) == 1
