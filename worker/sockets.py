"""ZeroMQ sockets between front and rank: their bounds, and a way to wait for a message."""

import asyncio

import zmq
import zmq.asyncio

MAX_QUEUED = 20_000  # above the most commands that all slots can have under way
MAX_MESSAGE_BYTES = 64 << 20


def configure(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> None:
    """Settings of both ends: bounded, and nothing lingers."""
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)


async def receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """One message of a socket that only receives, sooner than through zmq.asyncio.

    Its file descriptor tells that something changed, once; so we wait only after the socket was
    found empty, and watch only while we wait.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            await _change(loop, socket.fileno())


async def _change(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    changed = asyncio.Event()
    loop.add_reader(descriptor, changed.set)
    try:
        await changed.wait()
    finally:
        loop.remove_reader(descriptor)
