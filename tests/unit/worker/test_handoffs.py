"""Progress of a hand-off: merged for slow readers, awaited by early ones, ended once."""

import asyncio

import pytest

from paceline.core.errors import Cancelled, ErrorCode, KvUnavailable
from paceline.rpc.convert import error_from_proto
from paceline.v1 import common_pb2, kv_pb2
from paceline.worker.handoffs import HandoffTable, key_of


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
