"""The front's end of its rank's ZeroMQ sockets: commands, steps, and calls of the page pool.

All are ipc sockets in a private 0700 folder, which is removed once the rank has connected: after
a kill -9 nothing is left behind. Queues are bounded; a rank that lets its own fill up is stalled.
"""

import asyncio
import shutil
import tempfile
from itertools import count
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from paceline.core.errors import Unavailable
from paceline.engine.messages import PoolCall, PoolReply, StepOutput, Unpin
from paceline.worker.rank_messages import (
    FAILED,
    LINK,
    READY,
    STEP,
    LinkReply,
    Ping,
    RankCommand,
    RankFailed,
    RankReady,
)
from paceline.worker.sockets import configure, receive

MAX_POOL_CALLS = 256

RankOutput = RankReady | RankFailed | StepOutput | LinkReply

_DECODERS: dict[bytes, msgspec.msgpack.Decoder[RankOutput]] = {
    READY: msgspec.msgpack.Decoder(RankReady),
    FAILED: msgspec.msgpack.Decoder(RankFailed),
    STEP: msgspec.msgpack.Decoder(StepOutput),
    LINK: msgspec.msgpack.Decoder(LinkReply),
}


class RankLink:
    """Commands down, outputs up, and calls of the page pool beside them."""

    def __init__(self, run_dir: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-", dir=run_dir or None))
        self._context = zmq.asyncio.Context(io_threads=1)
        self.command_address = f"ipc://{self._folder}/command"
        self.step_address = f"ipc://{self._folder}/step"
        self.pool_address = f"ipc://{self._folder}/pool"
        self._commands = self._bind(zmq.PUSH, self.command_address)
        same: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context)
        self._steps = same.socket(zmq.PULL)
        configure(self._steps)
        self._steps.bind(self.step_address)
        self._pool = self._bind(zmq.PAIR, self.pool_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._replies = msgspec.msgpack.Decoder(PoolReply)
        self.last_step_unix_us = 0
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[PoolReply]] = {}
        self._call_places = asyncio.Semaphore(MAX_POOL_CALLS)
        self._is_closed = False
        self._answers = asyncio.create_task(self._receive_replies())

    def _bind(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        configure(socket)
        socket.bind(address)
        return socket

    def hide(self) -> None:
        """Both ends are connected: nobody else shall find the sockets."""
        shutil.rmtree(self._folder, ignore_errors=True)

    async def greet(self) -> None:
        """Returns when the threads that take commands and pool calls are connected too."""
        await self._commands.send(self._encoder.encode(Ping()))
        await self.receive()
        await self.call(Unpin([]))

    def send(self, command: RankCommand) -> None:
        """Never blocks. Raises Unavailable when the rank reads no more or the link is closed."""
        if self._is_closed:
            raise _stopped()
        sent = self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)
        assert isinstance(sent, asyncio.Future)  # done at once, as it must not block
        if sent.exception() is not None:
            raise Unavailable("the worker's engine does not take commands")

    async def receive(self) -> RankOutput:
        kind, payload, unix_us = await receive(self._steps)
        self.last_step_unix_us = int.from_bytes(unix_us, "little")
        return _DECODERS[kind].decode(payload)

    async def call(self, call: PoolCall) -> PoolReply:
        """Answered within microseconds by the rank's pool thread, whatever the step loop does.

        Raises Unavailable when the link is closed, and for no other reason: a lost unpin would
        be a lost page.
        """
        async with self._call_places:
            if self._is_closed:
                raise _stopped()
            number = next(self._numbers)
            future: asyncio.Future[PoolReply] = asyncio.get_running_loop().create_future()
            self._calls[number] = future
            try:
                message = [number.to_bytes(8, "little"), self._encoder.encode(call)]
                await self._pool.send_multipart(message)
                return await future
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._is_closed and task is not None and not task.cancelling():
                    raise _stopped() from None  # not the caller: the socket has given the send up
                raise
            finally:
                del self._calls[number]

    async def _receive_replies(self) -> None:
        while True:
            number, payload = await self._pool.recv_multipart()
            future = self._calls.get(int.from_bytes(number, "little"))
            if future is not None and not future.done():
                future.set_result(self._replies.decode(payload))

    async def close(self) -> None:
        """Fails the calls under way with Unavailable."""
        self._is_closed = True
        self._answers.cancel()
        await asyncio.gather(self._answers, return_exceptions=True)
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(_stopped())
                future.exception()  # seen: its caller may still be sending, or be cancelled
        self._steps.close()
        self._context.destroy(linger=0)
        self.hide()


def _stopped() -> Unavailable:
    return Unavailable("the worker's engine has stopped")
