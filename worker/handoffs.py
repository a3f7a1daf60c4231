"""Source side of a hand-off: what a prefill slot under a ticket has ready, and who follows it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from paceline.core.errors import KvUnavailable, Overloaded, PacelineError
from paceline.rpc.convert import error_to_proto
from paceline.v1 import common_pb2, kv_pb2
from paceline.worker.leases import HandoffKey, Reader

MAX_AWAITED = 1024
MAX_ENDED = 1024  # that are remembered for readers who come late


def key_of(ticket: common_pb2.Ticket) -> HandoffKey:
    return ticket.request_id, ticket.attempt


def reader_of(ticket: common_pb2.Ticket) -> Reader:
    return ticket.reader_worker, ticket.reader_incarnation


@dataclass(slots=True, eq=False)
class Handoff:
    """Progress of one prefill slot; `changed` is replaced at each change."""

    slot_number: int
    ticket: common_pb2.Ticket
    num_committed: int = 0
    lacking: list[int] | None = None  # the reader's first missing block, by page group
    record: kv_pb2.HandoffRecord | None = None
    rest: kv_pb2.PinResponse | None = None  # what it lacks, pinned
    is_told: bool = False  # its reader, of the rest, which is the reader's to unpin from then on
    error: PacelineError | None = None
    num_followers: int = 0
    last_followed: float = field(default_factory=time.monotonic)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_over(self) -> bool:
        return self.record is not None or self.error is not None

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[kv_pb2.ProgressEvent]:
        """An event a change, merged while the reader is slow; the last has record or error."""
        self.num_followers += 1
        self.last_followed = time.monotonic()
        sent = -1
        try:
            while True:
                changed, is_last = self.changed, self.is_over
                if is_last or self.num_committed > sent:
                    sent = self.num_committed
                    yield self._event()
                    if is_last:
                        return
                else:
                    await changed.wait()
        finally:
            self.num_followers -= 1
            self.last_followed = time.monotonic()

    def _event(self) -> kv_pb2.ProgressEvent:
        if self.error is not None:
            return kv_pb2.ProgressEvent(error=error_to_proto(self.error))
        rest = None if self.is_told else self.rest
        self.is_told = self.is_told or self.is_over
        return kv_pb2.ProgressEvent(
            num_committed_blocks=self.num_committed, record=self.record, rest=rest
        )


class HandoffTable:
    """Hand-offs of this incarnation. A reader may ask for one that has not begun yet."""

    def __init__(self) -> None:
        self._handoffs: dict[HandoffKey, Handoff] = {}
        self._awaited: dict[HandoffKey, asyncio.Future[Handoff]] = {}
        self._ended: dict[HandoffKey, str] = {}  # and why

    def __len__(self) -> int:
        return len(self._handoffs)

    def open(self, slot_number: int, ticket: common_pb2.Ticket) -> Handoff:
        key = key_of(ticket)
        if key in self._handoffs:
            raise KvUnavailable("the ticket is in use")
        handoff = self._handoffs[key] = Handoff(slot_number, ticket)
        waiter = self._awaited.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(handoff)
        return handoff

    def get(self, key: HandoffKey) -> Handoff | None:
        return self._handoffs.get(key)

    async def wait_for(self, key: HandoffKey, timeout_s: float) -> Handoff:
        """The hand-off, once its prefill has begun. Raises KvUnavailable after `timeout_s`, at once
        when it has ended or was refused."""
        found = self._handoffs.get(key)
        if found is not None:
            return found
        if key in self._ended:
            raise KvUnavailable(self._ended[key])
        if len(self._awaited) >= MAX_AWAITED:
            raise Overloaded("too many readers wait for hand-offs", retry_after_s=0.1)
        waiter = self._awaited.get(key)
        if waiter is None:
            waiter = self._awaited[key] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(asyncio.shield(waiter), timeout_s)
        except TimeoutError:
            raise KvUnavailable("no such hand-off here") from None
        finally:
            if self._awaited.get(key) is waiter and not waiter.done():
                del self._awaited[key]

    def close(self, handoff: Handoff, error: PacelineError) -> None:
        """Its KV is no longer held; who still follows gets `error`."""
        self._handoffs.pop(key_of(handoff.ticket), None)
        if handoff.record is None and handoff.error is None:
            handoff.error = error
        handoff.notify()
        self._end(key_of(handoff.ticket), error)

    def refuse(self, ticket: common_pb2.Ticket, error: PacelineError) -> None:
        """It does not begin here: its reader shall not wait for it."""
        if key_of(ticket) not in self._handoffs:
            self._end(key_of(ticket), error)

    def _end(self, key: HandoffKey, error: PacelineError) -> None:
        if len(self._ended) >= MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._ended[key] = reason = f"the hand-off has ended: {error.message}"
        waiter = self._awaited.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_exception(KvUnavailable(reason))

    def abandoned(
        self, is_silent: Callable[[Reader, float], bool], now_unix_ms: float
    ) -> list[Handoff]:
        """Those whose reader is silent, and those that nobody follows when their ticket ends."""
        return [
            h
            for h in self._handoffs.values()
            if is_silent(reader_of(h.ticket), h.last_followed)
            or (h.ticket.expires_unix_ms < now_unix_ms and not h.num_followers)
        ]
