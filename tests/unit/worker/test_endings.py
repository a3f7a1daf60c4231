"""A cancel that comes while something is being ended is not lost: a stop would wait for ever."""

import asyncio

import pytest

from paceline.v1 import worker_pb2
from paceline.worker.front import to_the_end
from paceline.worker.redis_record import RedisRecord


async def test_a_cancelled_withdrawal_stays_cancelled() -> None:
    record = RedisRecord("redis://127.0.0.1:1", beat_s=0.2)
    record.publish(worker_pb2.WorkerInfo(worker_id="w", incarnation="1"))
    await asyncio.sleep(0)
    withdrawing = asyncio.create_task(record.withdraw())
    await asyncio.sleep(0)
    withdrawing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await withdrawing


async def test_an_ending_is_done_whole_and_then_cancelled() -> None:
    done = []

    async def end() -> None:
        await asyncio.sleep(0.05)
        done.append(True)

    ending = asyncio.create_task(to_the_end(end()))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert done == [True]
