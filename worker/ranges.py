"""Pulls ranges of blocks of one hand-off: pin at the source, copy in a thread, unpin.

Pins of all readers share a bounded part of the source's pool: at that bound a range is asked for
again later, and smaller.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import KvUnavailable, Overloaded
from paceline.core.ids import BlockKey
from paceline.engine.messages import Reserved
from paceline.kv_transfer.base import CellSums
from paceline.kv_transfer.pull import PinnedPages, pull_verified
from paceline.v1 import common_pb2, kv_pb2
from paceline.worker.peers import Peer

if TYPE_CHECKING:
    from paceline.worker.session import Session

MAX_RANGE_BLOCKS = 128  # so that a pin is short-lived
MAX_PULL_S = 60.0  # of one range; silence of the source ends it much earlier
MAX_PIN_WAIT_S = 10.0  # of one range, for other readers to unpin
PIN_PAUSE_S = 0.1  # when the source does not say how long


@dataclass(frozen=True, slots=True)
class PulledRange:
    first_block: int
    checksums: list[list[int]]  # one list a full block


class RangePuller:
    """Copies into the pages of one reservation; at most one range is in flight."""

    def __init__(
        self,
        session: "Session",
        peer: Peer,
        reserved: Reserved,
        ticket: common_pb2.Ticket,
        num_tail_tokens: int,
        abort: threading.Event,
    ) -> None:
        self._session = session
        self._peer = peer
        self._reserved = reserved
        self._ticket = ticket
        self._num_tail_tokens = num_tail_tokens
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._copy: Future[list[CellSums]] | None = None

    @property
    def is_copying(self) -> bool:
        """A copy may be writing."""
        return self._copy is not None and not self._copy.done()

    async def pull(
        self, start: int, end: int, keys: Sequence[BlockKey], *, with_tail: bool = False
    ) -> AsyncIterator[PulledRange]:
        """Blocks [start, end) in ranges, the tail page with the last. Yields what is verified.

        Raises KvUnavailable, Unavailable when the source is gone, Overloaded when its pins are
        taken for too long.
        """
        num_pages = MAX_RANGE_BLOCKS
        waits_until = time.monotonic() + MAX_PIN_WAIT_S
        while start < end or with_tail:
            stop = min(end, start + num_pages)
            tail = with_tail and stop - start < num_pages  # the tail is a page too
            try:
                pulled = await self._pull_range(start, stop, keys[start:stop], tail)
            except Overloaded as error:
                if time.monotonic() > waits_until:
                    raise
                num_pages = max(1, (stop - start + tail) // 2)
                await asyncio.sleep(error.retry_after_s or PIN_PAUSE_S)
                continue
            yield pulled
            start = stop
            with_tail = with_tail and not tail
            waits_until = time.monotonic() + MAX_PIN_WAIT_S

    async def _pull_range(
        self, start: int, end: int, keys: Sequence[BlockKey], tail: bool
    ) -> PulledRange:
        beats = self._peer.beats
        async with self._session.pull_threads.turn(self._peer.turns):
            pinned = await self._pin(keys, tail)
            beats.hold(pinned.lease_id)
            try:
                parts = self._parts(start, end, pinned)
                sums = await self._read(parts)
                if beats.is_lost(pinned.lease_id):
                    raise KvUnavailable("the lease on the source's pages ended during the copy")
            finally:
                beats.drop(pinned.lease_id)
                self._unpin(pinned.lease_id)
        return PulledRange(start, sums[0].tolist() if end > start else [])

    async def _pin(self, keys: Sequence[BlockKey], tail: bool) -> kv_pb2.PinResponse:
        request = kv_pb2.PinRequest(ticket=self._ticket, keys=b"".join(keys), with_tail=tail)
        pinned = await self._peer.pin(request)
        num_tail_tokens = self._num_tail_tokens if tail else 0
        if len(pinned.pages) == len(keys) and pinned.num_tail_tokens == num_tail_tokens:
            return pinned
        self._unpin(pinned.lease_id)
        raise KvUnavailable(f"the source holds {len(pinned.pages)} of {len(keys)} blocks")

    def _parts(self, start: int, end: int, pinned: kv_pb2.PinResponse) -> list[PinnedPages]:
        first = start - self._reserved.num_cached_blocks
        pages = self._reserved.pages
        parts = []
        if end > start:
            parts.append(_pinned_pages(pinned.pages, pages[first : first + end - start], None))
        if pinned.num_tail_tokens:
            tail = pages[first + end - start : first + end - start + 1]
            parts.append(_pinned_pages([pinned.tail], tail, pinned.num_tail_tokens))
        return parts

    async def _read(self, parts: list[PinnedPages]) -> list[CellSums]:
        """In a thread; whoever stops us meanwhile waits for its end (`is_copying`)."""
        self._copy = self._session.pull_threads.submit(lambda: self._copy_parts(parts))
        try:
            return await asyncio.wrap_future(self._copy)
        finally:
            self._session.metrics.pulled(self._peer)

    def _copy_parts(self, parts: list[PinnedPages]) -> list[CellSums]:
        return [
            pull_verified(
                self._peer.link,
                part,
                self._peer.statistics,
                deadline=time.monotonic() + MAX_PULL_S,
                cancelled=self._abort,
                report=self._report,
            )
            for part in parts
        ]

    def _report(self, page: int, generation: int) -> None:
        """From the copying thread: the source shall hash that page again."""
        request = kv_pb2.ReportRequest(page=page, generation=generation)
        self._loop.call_soon_threadsafe(self._session.background, self._peer.report, request)

    def _unpin(self, lease_id: str) -> None:
        request = kv_pb2.UnpinRequest(ticket=self._ticket, lease_id=lease_id)
        self._session.background(self._peer.unpin, request)


def _pinned_pages(
    refs: Sequence[kv_pb2.PageRef], destination: Sequence[int], num_tokens: int | None
) -> PinnedPages:
    return PinnedPages(
        source_pages=np.array([ref.page for ref in refs], np.int64),
        destination_pages=np.array(destination, np.int64),
        generations=np.array([ref.generation for ref in refs], np.uint64),
        checksums=np.array([list(ref.checksums) for ref in refs], np.uint64),
        num_tokens=num_tokens,
    )
