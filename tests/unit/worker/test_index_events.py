"""Events for the index: in order, bounded, and replaced by a resync when they got lost."""

from paceline.engine.messages import Removed, Stored
from paceline.worker import index_events
from paceline.worker.index_events import IndexEvents


def taken_from(events: IndexEvents) -> list[tuple[str, str, list[bytes]]]:
    return [(event.kind, event.tier, event.keys) for event in events.take()]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")[::-1]


def test_a_new_incarnation_begins_with_an_empty_set() -> None:
    events = IndexEvents()
    assert events
    assert taken_from(events) == [("cleared", "device", [])]
    assert not events


def test_events_keep_their_order_and_carry_short_keys() -> None:
    events = IndexEvents()
    list(events.take())
    events.add(Stored([key(1), key(2)]))
    events.add(Removed([key(1)]))
    short = [key(number)[:16] for number in (1, 2)]
    assert taken_from(events) == [("stored", "device", short), ("removed", "device", short[:1])]
    assert events.keys == {"device": {short[1]}}


def test_after_a_loss_the_whole_set_is_sent() -> None:
    events = IndexEvents()
    list(events.take())
    events.add(Stored([key(1), key(2)]))
    events.lost()
    events.add(Removed([key(2)]))
    expected = [("cleared", "device", []), ("stored", "device", [key(1)[:16]])]
    assert taken_from(events) == expected


def test_too_many_waiting_events_become_one_resync() -> None:
    events = IndexEvents()
    list(events.take())
    for number in range(index_events.MAX_WAITING_EVENTS + 10):
        events.add(Stored([key(number)]))
    taken = taken_from(events)
    assert taken[0] == ("cleared", "device", [])
    assert sum(len(keys) for *_, keys in taken) == index_events.MAX_WAITING_EVENTS + 10
    assert all(len(keys) <= index_events.MAX_EVENT_KEYS for *_, keys in taken)


def test_sequences_rise_by_one() -> None:
    events = IndexEvents()
    assert [events.next_sequence() for _ in range(3)] == [1, 2, 3]


def test_each_tier_has_a_set_of_its_own() -> None:
    events = IndexEvents()
    list(events.take())
    events.add(Stored([key(1)]))
    events.add(Stored([key(1)]), "host")
    events.add(Removed([key(1)]))
    short = [key(1)[:16]]
    assert taken_from(events)[1:] == [("stored", "host", short), ("removed", "device", short)]
    assert events.keys == {"device": set(), "host": set(short)}


def test_tiers_outlive_the_pool() -> None:
    events = IndexEvents()
    events.add(Stored([key(1)]))
    events.add(Stored([key(2)]), "file")
    expected = [("cleared", "device", []), ("stored", "file", [key(2)[:16]])]
    assert taken_from(IndexEvents(events)) == expected


def test_tiers_that_are_made_anew_leave_nothing_to_the_next_incarnation() -> None:
    events = IndexEvents()
    events.add(Stored([key(1)]))
    events.add(Stored([key(2)]), "host")
    events.forget_tiers()
    following = IndexEvents(events)
    assert taken_from(following) == [("cleared", "device", [])]
    following.add(Stored([key(2)]), "host")
    following.add_digests()
    assert {event.tier for event in following.take()} == {"device", "host"}
