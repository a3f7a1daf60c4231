"""Waiting for messages of a ZeroMQ socket on the event loop."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from paceline.worker.sockets import configure, receive

Socket = zmq.Socket[bytes]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Socket, Socket]]:
    """One that sends, one that receives."""
    context: zmq.Context[Socket] = zmq.Context()
    sender, receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket in (sender, receiver):
        configure(socket)
    receiver.bind(f"ipc://{tmp_path}/socket")
    sender.connect(f"ipc://{tmp_path}/socket")
    yield sender, receiver
    context.destroy(linger=0)


async def take(receiver: Socket, num_messages: int) -> list[bytes]:
    async with asyncio.timeout(5):
        return [(await receive(receiver))[0] for _ in range(num_messages)]


async def test_bursts_and_pauses_lose_nothing(ends: tuple[Socket, Socket]) -> None:
    sender, receiver = ends
    for burst in (1, 100, 1, 3):
        taking = asyncio.create_task(take(receiver, burst))
        await asyncio.sleep(0.02)  # it has found nothing, and waits
        expected = [b"%d of %d" % (number, burst) for number in range(burst)]
        for message in expected:
            sender.send(message)
        assert await taking == expected


async def test_a_message_outlives_the_wait_that_was_cancelled(ends: tuple[Socket, Socket]) -> None:
    sender, receiver = ends
    waiting = asyncio.create_task(receive(receiver))
    await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.wait([waiting])
    sender.send(b"late")
    assert await take(receiver, 1) == [b"late"]
