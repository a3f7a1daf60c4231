"""One router's Attach stream: what is to be said on it, bounded, and who is on it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError, Unavailable
from paceline.rpc.convert import error_to_proto
from paceline.v1 import common_pb2, worker_pb2

if TYPE_CHECKING:
    from paceline.worker.slots import SlotState

MAX_QUEUED_FRAMES = 512  # a router that leaves so many unread, or so many bytes, is gone
MAX_QUEUED_BYTES = 64 << 20
STUCK_WRITE_S = 1.0


class GivenUp(Unavailable):
    """The worker leaves, or has another role: another one can go on, after the tokens so far."""


class RouterStream:
    """Collects what happened to this router's slots into one frame a step.

    `add_*` then `flush`; the handler of Attach sends what `frames` yields. After `close` all is
    silent: nothing is queued any more and `frames` ends.
    """

    def __init__(self, handler: "asyncio.Task[object] | None" = None) -> None:
        self.slots: dict[int, SlotState] = {}
        self.kept: dict[int, tuple[int, asyncio.TimerHandle]] = {}  # engine's number, by slot
        self.last_heard = time.monotonic()
        self.end: PacelineError | None = None
        self._handler = handler
        self._pending = worker_pb2.WorkerFrame()
        self._is_dirty = False
        self._queue: asyncio.Queue[worker_pb2.WorkerFrame | None] = asyncio.Queue(MAX_QUEUED_FRAMES)
        self._num_bytes = 0  # in the queue

    @property
    def is_closed(self) -> bool:
        return self.end is not None

    def add_info(self, info: worker_pb2.WorkerInfo) -> None:
        """It has changed."""
        self._pending.info.CopyFrom(info)
        self._is_dirty = True

    def add_emission(self, emission: common_pb2.Emission) -> None:
        self._pending.emissions.append(emission)
        self._is_dirty = True

    def add_error(self, router_slot: int, error: PacelineError) -> None:
        elsewhere = isinstance(error, GivenUp)
        self._pending.errors.add(slot=router_slot, error=error_to_proto(error), elsewhere=elsewhere)
        self._is_dirty = True

    def add_reserved(self, router_slot: int, num_cached_tokens: int) -> None:
        self._pending.reserved.add(slot=router_slot, num_cached_tokens=num_cached_tokens)
        self._is_dirty = True

    def add_busy(self, router_slot: int, num_needed: int, num_free: int) -> None:
        self._pending.busy.add(
            slot=router_slot, num_pages_needed=num_needed, num_pages_free=num_free
        )
        self._is_dirty = True

    def add_ended(self, router_slot: int) -> None:
        self._pending.ended_slots.append(router_slot)
        self._is_dirty = True

    def flush(
        self,
        load: worker_pb2.Load,
        *,
        beat: bool = False,
        links: Iterable[worker_pb2.LinkFigure] = (),
    ) -> None:
        """Queues what was added as one frame; a `beat` goes out even when nothing was."""
        if self.is_closed or not (self._is_dirty or beat):
            return
        frame, self._pending = self._pending, worker_pb2.WorkerFrame()
        self._is_dirty = False
        frame.load.CopyFrom(load)
        frame.links.extend(links)
        self._num_bytes += frame.ByteSize()
        if self._queue.full() or self._num_bytes > MAX_QUEUED_BYTES:
            self.close(PacelineError("the router does not read its stream"))
        else:
            self._queue.put_nowait(frame)

    def close(self, end: PacelineError) -> None:
        """Ends `frames`; a handler stuck in a write is cancelled a second later."""
        if self.is_closed:
            return
        self.end = end
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)
        if self._handler is not None:
            asyncio.get_running_loop().call_later(STUCK_WRITE_S, self._handler.cancel)

    async def frames(self) -> AsyncIterator[worker_pb2.WorkerFrame]:
        while True:
            frame = await self._queue.get()
            if frame is None:
                return
            self._num_bytes -= frame.ByteSize()
            yield frame
