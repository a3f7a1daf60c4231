"""The front's end of the link to its rank, against a peer that answers as the pool thread does."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from paceline.core.errors import Unavailable
from paceline.engine.messages import PoolCall, PoolReply, Unpin, Unpinned
from paceline.worker.rank_link import MAX_POOL_CALLS, RankLink
from paceline.worker.rank_messages import Ping

_CALLS: msgspec.msgpack.Decoder[PoolCall] = msgspec.msgpack.Decoder(PoolCall)


@pytest.fixture
async def link(tmp_path: Path) -> AsyncIterator[RankLink]:
    link = RankLink(str(tmp_path))
    yield link
    await link.close()


@pytest.fixture
async def pool(link: RankLink) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(link.pool_address)
    yield socket
    context.destroy(linger=0)


async def answer(pool: zmq.asyncio.Socket, num_calls: int) -> list[PoolCall]:
    calls = []
    for _ in range(num_calls):
        number, payload = await pool.recv_multipart()
        calls.append(_CALLS.decode(payload))
        await pool.send_multipart([number, msgspec.msgpack.encode(Unpinned())])
    return calls


async def test_calls_beyond_the_bound_wait_and_none_is_lost(
    link: RankLink, pool: zmq.asyncio.Socket
) -> None:
    unpins = [Unpin([(page, 1)]) for page in range(2 * MAX_POOL_CALLS + 1)]
    calls = [asyncio.create_task(link.call(unpin)) for unpin in unpins]
    async with asyncio.timeout(10):
        assert await answer(pool, len(unpins)) == unpins
        replies: list[PoolReply] = await asyncio.gather(*calls)
    assert replies == [Unpinned()] * len(unpins)


async def test_close_fails_every_call(link: RankLink, pool: zmq.asyncio.Socket) -> None:
    calls = [asyncio.create_task(link.call(Unpin([]))) for _ in range(MAX_POOL_CALLS + 2)]
    await pool.recv_multipart()
    await link.close()
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(failure, Unavailable) for failure in failures)


async def test_close_fails_calls_that_were_not_sent_yet(link: RankLink) -> None:
    """Nobody has connected: nothing leaves. No failure stays behind that nobody has seen."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
    calls = [asyncio.create_task(link.call(Unpin([]))) for _ in range(3)]
    await asyncio.sleep(0)
    calls[0].cancel()
    await link.close()
    first, *others = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert all(isinstance(failure, Unavailable) for failure in others)
    gc.collect()
    assert not complaints


async def test_a_cancelled_close_stays_cancelled(link: RankLink) -> None:
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing


async def test_a_command_after_the_close_is_unavailable(tmp_path: Path) -> None:
    link = RankLink(str(tmp_path))
    await link.close()
    with pytest.raises(Unavailable, match="has stopped"):
        link.send(Ping())
