"""A stream's frames: one a flush, bounded, silent once closed."""

import asyncio

import pytest

from paceline.core.errors import Unavailable
from paceline.v1 import common_pb2, worker_pb2
from paceline.worker import router_stream
from paceline.worker.router_stream import MAX_QUEUED_FRAMES, RouterStream

LOAD = worker_pb2.Load(num_running=1)


async def test_what_happened_in_a_step_is_one_frame() -> None:
    stream = RouterStream()
    stream.add_emission(common_pb2.Emission(slot=1))
    stream.add_emission(common_pb2.Emission(slot=2))
    stream.add_error(3, Unavailable("no"))
    stream.add_ended(3)
    stream.flush(LOAD)
    stream.flush(LOAD)  # nothing new: no frame
    stream.flush(LOAD, beat=True)
    frames = stream.frames()
    first, second = await anext(frames), await anext(frames)
    assert [emission.slot for emission in first.emissions] == [1, 2]
    assert list(first.ended_slots) == [3]
    assert first.load == second.load == LOAD
    assert not second.emissions


async def test_a_router_that_does_not_read_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_stream, "STUCK_WRITE_S", 0.05)

    async def write_for_ever() -> None:
        await asyncio.Event().wait()

    handler = asyncio.create_task(write_for_ever())
    stream = RouterStream(handler)
    for slot in range(MAX_QUEUED_FRAMES):
        stream.add_ended(slot)
        stream.flush(LOAD)
    assert not stream.is_closed
    stream.add_ended(0)
    stream.flush(LOAD)
    assert stream.is_closed
    assert [frame async for frame in stream.frames()] == []  # and all memory is given back
    await asyncio.wait([handler], timeout=2)
    assert handler.cancelled()


async def test_a_router_that_leaves_too_many_bytes_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_stream, "MAX_QUEUED_BYTES", 1000)
    stream = RouterStream()
    frames = stream.frames()
    large = common_pb2.Emission(slot=1, token_ids=[1] * 300)
    for _ in range(20):  # one at a time may be any number
        stream.add_emission(large)
        stream.flush(LOAD)
        assert (await anext(frames)).emissions[0] == large
    for _ in range(4):
        assert not stream.is_closed
        stream.add_emission(large)
        stream.flush(LOAD)
    assert stream.is_closed


async def test_a_closed_stream_says_nothing_more() -> None:
    stream = RouterStream()
    stream.close(Unavailable("first"))
    stream.close(Unavailable("second"))
    stream.add_ended(1)
    stream.flush(LOAD, beat=True)
    assert [frame async for frame in stream.frames()] == []
    assert stream.end is not None and stream.end.message == "first"
