"""Progress of a hand-off: merged for slow readers, awaited by early ones, ended once."""

import asyncio

import pytest

from paceline.core.errors import Cancelled, ErrorCode, InvalidRequest, KvUnavailable
from paceline.rpc.convert import error_from_proto
from paceline.v1 import common_pb2, kv_pb2
from paceline.worker.handoffs import MAX_ENDED, HandoffTable, key_of


def ticket(request_id: str = "r", expires_unix_ms: int = 2_000) -> common_pb2.Ticket:
    return common_pb2.Ticket(
        request_id=request_id,
        attempt=1,
        reader_worker="d",
        reader_incarnation="1",
        expires_unix_ms=expires_unix_ms,
    )


async def test_a_slow_reader_sees_the_newest_progress_only() -> None:
    handoff = HandoffTable().open(7, ticket())
    events = handoff.follow()
    assert (await anext(events)).num_committed_blocks == 0
    for num_blocks in (1, 2, 5):
        handoff.num_committed = num_blocks
        handoff.notify()
    assert (await anext(events)).num_committed_blocks == 5
    handoff.record = kv_pb2.HandoffRecord(num_tokens=90)
    handoff.notify()
    assert (await anext(events)).record.num_tokens == 90
    assert [event async for event in events] == []


async def test_a_reader_may_come_before_the_prefill() -> None:
    table = HandoffTable()
    waiting = asyncio.create_task(table.wait_for(("r", 1), 5))
    await asyncio.sleep(0)
    opened = table.open(7, ticket())
    assert await waiting is opened
    assert await table.wait_for(("r", 1), 5) is opened


async def test_a_prefill_that_never_comes_is_an_error_in_time() -> None:
    table = HandoffTable()
    with pytest.raises(KvUnavailable):
        await table.wait_for(("r", 1), 0.02)
    assert not table._awaited


async def test_an_end_reaches_who_follows() -> None:
    table = HandoffTable()
    handoff = table.open(7, ticket())
    events = handoff.follow()
    await anext(events)
    table.close(handoff, Cancelled("gone"))
    assert error_from_proto((await anext(events)).error).code is ErrorCode.CANCELLED
    assert table.get(key_of(handoff.ticket)) is None


async def test_a_ticket_is_good_for_one_prefill_at_a_time() -> None:
    table = HandoffTable()
    table.open(7, ticket())
    with pytest.raises(KvUnavailable):
        table.open(8, ticket())


async def test_handoffs_end_with_their_reader_or_unfollowed_with_their_ticket() -> None:
    table = HandoffTable()
    followed = table.open(1, ticket("a", expires_unix_ms=500))
    late = table.open(2, ticket("b", expires_unix_ms=500))
    good = table.open(3, ticket("c", expires_unix_ms=2_000))
    events = followed.follow()
    await anext(events)
    assert table.abandoned(lambda reader, since: False, now_unix_ms=1_000) == [late]
    assert table.abandoned(lambda reader, since: True, now_unix_ms=1_000) == [followed, late, good]
    await events.aclose()
    gone = table.abandoned(lambda reader, since: False, now_unix_ms=1_000)
    assert gone == [followed, late]


async def test_who_comes_late_or_waits_already_is_told_at_once_that_it_has_ended() -> None:
    table = HandoffTable()
    table.close(table.open(7, ticket()), Cancelled("gone"))
    with pytest.raises(KvUnavailable, match="ended: gone"):
        await asyncio.wait_for(table.wait_for(("r", 1), 60), 1)
    waiting = [asyncio.create_task(table.wait_for(("other", 1), 60)) for _ in range(2)]
    await asyncio.sleep(0)
    table.refuse(ticket("other"), InvalidRequest("token_ids", 9, "are too many"))
    for waiter in waiting:
        with pytest.raises(KvUnavailable, match="too many"):
            await asyncio.wait_for(waiter, 1)
    assert not table._awaited


async def test_one_that_goes_on_is_not_refused_by_another_try() -> None:
    table = HandoffTable()
    handoff = table.open(7, ticket())
    table.refuse(ticket(), KvUnavailable("the ticket is in use"))
    assert await table.wait_for(("r", 1), 1) is handoff


async def test_of_those_that_have_ended_a_bounded_number_is_remembered() -> None:
    table = HandoffTable()
    for i in range(MAX_ENDED + 5):
        table.refuse(ticket(f"r{i}"), KvUnavailable("no"))
    assert len(table._ended) == MAX_ENDED
    with pytest.raises(KvUnavailable, match="no such"):
        await table.wait_for(("r0", 1), 0.01)
