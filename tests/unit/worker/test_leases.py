"""Leases end when their reader says so, forgets them, or falls silent; never otherwise."""

import pytest

from paceline.core.errors import Overloaded
from paceline.worker.leases import MAX_LEASE_S, LeaseTable

READER = ("reader", "1")
OTHER = ("reader", "2")  # another incarnation of it
HANDOFF = ("request", 0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable:
    return LeaseTable(max_pages=10, silence_s=6.0, clock=clock)


def pinned(table: LeaseTable, reader: tuple[str, str], pages: list[tuple[int, int]]) -> str:
    lease_id = table.open(reader, HANDOFF)
    assert table.add(lease_id, pages)
    return lease_id


def test_a_release_gives_the_pages_back_once(table: LeaseTable) -> None:
    lease_id = pinned(table, READER, [(1, 5), (2, 5)])
    assert table.num_pages == 2
    assert table.release(lease_id, READER) == [(1, 5), (2, 5)]
    assert table.release(lease_id, READER) == []
    assert (table.num_pages, len(table)) == (0, 0)


def test_a_reader_cannot_end_the_lease_of_another(table: LeaseTable) -> None:
    lease_id = pinned(table, READER, [(1, 5)])
    assert table.release(lease_id, OTHER) == []
    assert table.num_pages == 1


def test_a_revoked_handoff_holds_nothing(table: LeaseTable) -> None:
    first, second = pinned(table, READER, [(1, 5)]), pinned(table, READER, [(2, 5), (3, 5)])
    other = table.open(READER, ("request", 1))
    assert table.add(other, [(4, 5)])
    assert table.revoke(HANDOFF) == [(1, 5), (2, 5), (3, 5)]
    assert set(table.beat(READER, [first, second, other])[1]) == {first, second}
    assert table.num_pages == 1


def test_no_lease_outlives_any_pull(table: LeaseTable, clock: Clock) -> None:
    lease_id = pinned(table, READER, [(1, 1)])
    for _ in range(round(MAX_LEASE_S)):
        clock.now += 1
        table.beat(READER, [lease_id])
        assert table.sweep() == []
    clock.now += 1
    table.beat(READER, [lease_id])
    assert table.sweep() == [(1, 1)]
    assert table.beat(READER, [lease_id])[1] == [lease_id]


def test_a_lease_unlisted_twice_is_released(table: LeaseTable) -> None:
    kept, lost = pinned(table, READER, [(1, 1)]), pinned(table, READER, [(2, 1)])
    assert table.beat(READER, [kept]) == ([], [])
    assert table.beat(READER, [kept, lost]) == ([], [])  # listed again: counted from anew
    assert table.beat(READER, [kept]) == ([], [])
    assert table.beat(READER, [kept]) == ([(2, 1)], [])
    assert table.beat(READER, [kept, lost]) == ([], [lost])


def test_beats_of_one_incarnation_do_not_touch_another(table: LeaseTable) -> None:
    lease_id = pinned(table, READER, [(1, 1)])
    for _ in range(3):
        assert table.beat(OTHER, []) == ([], [])
    assert table.beat(OTHER, [lease_id]) == ([], [lease_id])
    assert table.num_pages == 1


def test_silence_ends_all_leases_of_a_reader(table: LeaseTable, clock: Clock) -> None:
    mine, other = pinned(table, READER, [(1, 1)]), pinned(table, OTHER, [(2, 1)])
    clock.now += 5
    table.beat(OTHER, [other])
    clock.now += 2
    assert table.sweep() == [(1, 1)]
    assert table.num_expired == 1
    assert table.sweep() == []
    assert table.beat(READER, [mine]) == ([], [mine])


def test_a_reader_is_silent_from_when_it_was_last_heard(table: LeaseTable, clock: Clock) -> None:
    assert not table.is_silent(READER, since=clock.now - 5)
    assert table.is_silent(READER, since=clock.now - 7)
    table.beat(READER, [])
    assert not table.is_silent(READER, since=clock.now - 7)


def test_promises_count_towards_the_cap(table: LeaseTable) -> None:
    pinned(table, READER, [(page, 1) for page in range(4)])
    table.promise(5)
    with pytest.raises(Overloaded):
        table.promise(2)
    table.keep(5)
    table.promise(6)


def test_pins_for_a_lease_that_ended_meanwhile_are_not_kept(table: LeaseTable) -> None:
    lease_id = table.open(READER, HANDOFF)
    table.release(lease_id, READER)
    assert not table.add(lease_id, [(1, 1)])
    assert table.num_pages == 0
