"""When workers move between the roles: never the last, one at a time, never back for no reason."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.router.role_balance import CALM, Flip, RoleBalance, Wanted, sides_of
from paceline.v1 import control_pb2, worker_pb2

PREFILL, DECODE, BOTH = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE, worker_pb2.ROLE_BOTH
WANTED = Wanted(prefill_s=1.0, decode_share=0.8, hold_s=10.0, cool_down_s=30.0)
NUM_PAGES = 1000
LOOK_S = 1.0


def known(
    name: str,
    role: worker_pb2.Role,
    ahead_s: float = 0.0,
    in_use: float = 0.0,
    num_running: int = 0,
    *,
    is_usable: bool = True,
) -> control_pb2.KnownWorker:
    load = worker_pb2.Load(
        num_waiting_tokens=round(1000 * ahead_s),
        prompt_token_us=1000,
        num_pages=NUM_PAGES,
        num_free_pages=max(0, round(NUM_PAGES * (1 - in_use))),
        num_running=num_running,
    )
    info = worker_pb2.WorkerInfo(worker_id=name, role=role)
    return control_pb2.KnownWorker(info=info, load=load, is_usable=is_usable)


@dataclass
class Fleet:
    """`work_s`: of prompts that wait, `pages`: in use, of all workers together, spread evenly."""

    roles: dict[str, worker_pb2.Role]
    balance: RoleBalance = field(default_factory=lambda: RoleBalance(WANTED))
    flips: list[tuple[float, Flip]] = field(default_factory=list)
    now: float = 0.0

    def count(self, role: worker_pb2.Role) -> int:
        return sum(one == role for one in self.roles.values())

    def look(self, work_s: float, pages: float, num_queued: int = 0) -> None:
        workers = [
            known(
                name,
                role,
                ahead_s=work_s / self.count(PREFILL) if role == PREFILL else 0.0,
                in_use=min(1.0, pages / self.count(DECODE)) if role == DECODE else 0.0,
            )
            for name, role in self.roles.items()
        ]
        flip = self.balance.look({"ab": sides_of(workers, num_queued, WANTED)}, self.now)
        if flip is not None:
            self.roles[flip.worker.info.worker_id] = flip.role
            self.flips.append((self.now, flip))
        self.now += LOOK_S


def fleet_of(num_prefill: int, num_decode: int) -> Fleet:
    roles = {f"p{i}": PREFILL for i in range(num_prefill)}
    return Fleet(roles | {f"d{i}": DECODE for i in range(num_decode)})


_sizes = st.integers(1, 5)
_loads = st.tuples(st.floats(0, 12), st.floats(0, 6), st.integers(0, 60))  # work, pages, queued


@given(_sizes, _sizes, st.lists(st.tuples(_loads, st.integers(1, 40)), max_size=12))
@settings(max_examples=150, deadline=None)
def test_never_the_last_one_never_two_at_once_and_not_before_it_is_time(
    num_prefill: int, num_decode: int, phases: list[tuple[tuple[float, float, int], int]]
) -> None:
    fleet = fleet_of(num_prefill, num_decode)
    for (work_s, pages, num_queued), num_looks in phases:
        for _ in range(num_looks):
            fleet.look(work_s, pages, num_queued)
            assert fleet.count(PREFILL) >= 1 and fleet.count(DECODE) >= 1
    times = [at for at, _ in fleet.flips]
    assert all(at >= WANTED.hold_s for at in times)
    assert all(b - a >= WANTED.cool_down_s for a, b in zip(times, times[1:], strict=False))


@given(_sizes, _sizes, st.floats(0, 12), st.floats(0, 6))
@settings(max_examples=150, deadline=None)
def test_a_load_that_stays_moves_no_worker_back(
    num_prefill: int, num_decode: int, work_s: float, pages: float
) -> None:
    fleet = fleet_of(num_prefill, num_decode)
    for _ in range(600):
        fleet.look(work_s, pages)
    assert len({flip.role for _, flip in fleet.flips}) <= 1
    assert len(fleet.flips) < len(fleet.roles)


def test_a_shift_of_load_moves_one_there_and_back() -> None:
    fleet = fleet_of(2, 2)
    for _ in range(120):
        fleet.look(work_s=4.0, pages=0.4)
    assert (fleet.count(PREFILL), fleet.count(DECODE)) == (3, 1)
    for _ in range(120):
        fleet.look(work_s=0.2, pages=1.5)
    assert (fleet.count(PREFILL), fleet.count(DECODE)) == (2, 2), "and one more is not called for"


def test_a_burst_shorter_than_the_hold_moves_nobody() -> None:
    fleet = fleet_of(1, 3)
    for number in range(200):
        fleet.look(work_s=5.0 if number % 10 < 9 else 0.0, pages=0.1)
    assert not fleet.flips


@pytest.mark.parametrize(("num_queued", "is_moved"), [(0, False), (40, True)])
def test_what_waits_in_routers_counts_for_decode(num_queued: int, is_moved: bool) -> None:
    fleet = fleet_of(3, 2)
    for _ in range(20):
        fleet.look(work_s=0.1, pages=1.0, num_queued=num_queued)
    assert bool(fleet.flips) == is_moved


def test_the_idlest_one_goes_and_those_that_may_get_no_work_count_for_nothing() -> None:
    workers = [
        known("p0", PREFILL, ahead_s=4.0),
        known("d0", DECODE, num_running=9),
        known("d1", DECODE, num_running=2),
        known("d2", DECODE, is_usable=False),
        known("b0", BOTH),
    ]
    sides = sides_of(workers, 0, WANTED)
    assert (sides.prefill.pressure, sides.decode.pressure) == (pytest.approx(4.0), 0.0)
    assert sides.flip is not None
    assert (sides.flip.worker.info.worker_id, sides.flip.role) == ("d1", PREFILL)
    assert sides_of(workers[:2], 0, WANTED).flip is None, "the last one"
    full = [known(f"d{i}", DECODE, in_use=0.9 * CALM) for i in range(2)]
    assert sides_of([workers[0], *full], 0, WANTED).flip is None, "one alone would not do"


def test_when_nobody_tells_time_begins_anew() -> None:
    balance = RoleBalance(WANTED)
    sides = {
        "ab": sides_of(
            [known("p0", PREFILL, 4.0), known("d0", DECODE), known("d1", DECODE)], 0, WANTED
        )
    }
    assert balance.look(sides, 0.0) is None
    assert balance.look({}, 6.0) is None
    assert balance.look(sides, 12.0) is None
    assert balance.look(sides, 22.0) is not None
