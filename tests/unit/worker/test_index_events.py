"""Events for the index: in order, bounded, and replaced by a resync when they got lost."""

from paceline.engine.messages import Removed, Stored
from paceline.worker import index_events
from paceline.worker.index_events import IndexEvents


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")[::-1]


def test_a_new_incarnation_begins_with_an_empty_set() -> None:
    events = IndexEvents()
    assert events
    assert list(events.take()) == [("cleared", [])]
    assert not events


def test_events_keep_their_order_and_carry_short_keys() -> None:
    events = IndexEvents()
    list(events.take())
    events.add(Stored([key(1), key(2)]))
    events.add(Removed([key(1)]))
    short = [key(number)[:16] for number in (1, 2)]
    assert list(events.take()) == [("stored", short), ("removed", short[:1])]
    assert events.keys == {short[1]}


def test_after_a_loss_the_whole_set_is_sent() -> None:
    events = IndexEvents()
    list(events.take())
    events.add(Stored([key(1), key(2)]))
    events.lost()
    events.add(Removed([key(2)]))
    assert list(events.take()) == [("cleared", []), ("stored", [key(1)[:16]])]


def test_too_many_waiting_events_become_one_resync() -> None:
    events = IndexEvents()
    list(events.take())
    for number in range(index_events.MAX_WAITING_EVENTS + 10):
        events.add(Stored([key(number)]))
    taken = list(events.take())
    assert taken[0] == ("cleared", [])
    assert sum(len(keys) for _, keys in taken) == index_events.MAX_WAITING_EVENTS + 10
    assert all(len(keys) <= index_events.MAX_EVENT_KEYS for _, keys in taken)


def test_sequences_rise_by_one() -> None:
    events = IndexEvents()
    assert [events.next_sequence() for _ in range(3)] == [1, 2, 3]
