"""Pulls ranges of blocks of one hand-off: pin at the source, copy in a thread, unpin."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import KvUnavailable
from paceline.core.ids import BlockKey
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.messages import Reserved
from paceline.kv_transfer.base import CellSums
from paceline.kv_transfer.pull import PinnedPages, pull_verified
from paceline.v1 import common_pb2, kv_pb2
from paceline.worker.peers import CALL_TIMEOUT_S, Peer

if TYPE_CHECKING:
    from paceline.worker.session import Session

MAX_RANGE_BLOCKS = 256  # so that a pin is short-lived
MAX_PULL_S = 60.0  # of one range; silence of the source ends it much earlier


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
        abort: threading.Event,
    ) -> None:
        self._session = session
        self._peer = peer
        self._reserved = reserved
        self._ticket = ticket
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._copy: Future[list[CellSums]] | None = None

    @property
    def is_copying(self) -> bool:
        """A copy may be writing; one that waits for its thread is taken back."""
        copy = self._copy
        return copy is not None and not copy.cancel() and not copy.done()

    async def pull(
        self, start: int, end: int, keys: Sequence[BlockKey], *, with_tail: bool = False
    ) -> AsyncIterator[PulledRange]:
        """Blocks [start, end) in ranges, the tail page with the last. Yields what is verified.

        Raises KvUnavailable, or what grpc raises when the source is gone.
        """
        while start < end or with_tail:
            stop = min(end, start + MAX_RANGE_BLOCKS)
            tail = with_tail and stop == end
            yield await self._pull_range(start, stop, keys[start:stop], tail)
            start = stop
            with_tail = with_tail and not tail

    async def _pull_range(
        self, start: int, end: int, keys: Sequence[BlockKey], tail: bool
    ) -> PulledRange:
        pinned = await self._pin(keys, tail)
        beats = self._peer.beats
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
        info = self._session.info
        request = kv_pb2.PinRequest(
            reader_worker=info.worker_id,
            reader_incarnation=info.incarnation,
            source_incarnation=self._ticket.source_incarnation,
            keys=b"".join(keys),
            tail=self._ticket if tail else None,
        )
        pinned: kv_pb2.PinResponse = await self._peer.stub.Pin(request, timeout=CALL_TIMEOUT_S)
        num_tail_tokens = self._num_tail_tokens if tail else 0
        if len(pinned.pages) == len(keys) and pinned.num_tail_tokens == num_tail_tokens:
            return pinned
        self._unpin(pinned.lease_id)
        raise KvUnavailable(f"the source holds {len(pinned.pages)} of {len(keys)} blocks")

    @property
    def _num_tail_tokens(self) -> int:
        slot = self._reserved.slot
        state = self._session.slots.get(slot)
        return len(state.request.token_ids) % PAGE_TOKENS if state is not None else 0

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
        """In a thread of the pull pool; whoever stops us meanwhile waits for it by `is_copying`."""
        self._copy = self._session.pull_threads.submit(self._copy_parts, parts)
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
        request = kv_pb2.UnpinRequest(lease_id=lease_id)
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
