"""Reads pages of segments, those that follow each other at once, in threads of its own.

A thread reads into a buffer of its own, and copies from there to where the pages go, unless the
reader has given up meanwhile: a store that hangs costs time, but never writes into the pool late.
"""

import errno
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import structlog

from paceline.core.errors import Cancelled, KvUnavailable, PeerGone
from paceline.core.kv_layout import PageGroup
from paceline.kernels.pages import copy_pages
from paceline.kv_transfer.base import CellSums, LocalPool, PageIds, Piece
from paceline.kv_transfer.tiers.medium import SegmentMedium
from paceline.kv_transfer.tiers.segment_books import MAX_PLACES, PLACE_BITS, SegmentBooks
from paceline.kv_transfer.tiers.segment_format import ALIGNMENT, aligned, new_buffer

READ_BYTES = 8 << 20  # at once
CANCEL_S = 0.05  # that a read which waits for the store takes to see that it is cancelled
REST_S = 10.0  # a store that was late is not asked for so long

_log = structlog.get_logger("paceline.tiers")


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of a piece whose pages follow each other in one segment, from `place` on."""

    segment: int
    place: int
    rows: PageIds


@dataclass(slots=True, eq=False)
class Reading:
    """One piece on its way. `is_over`: nothing is copied any more."""

    piece: Piece
    pool: LocalPool
    page: PageGroup
    sums: CellSums
    cancelled: threading.Event
    num_left: int = 0
    num_copying: int = 0
    error: OSError | None = None
    is_over: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def copy(self, run: Run, memory: memoryview, place: int) -> None:
        """`place`: of the run's first page in `memory`."""
        with self.changed:
            if self.is_over:
                return
            self.num_copying += 1
        try:
            self.sums[run.rows] = copy_pages(
                self.pool.memory,
                memory,
                self.piece.destination_pages[run.rows],
                np.arange(place, place + len(run.rows)),
                self.page,
            )
        finally:
            with self.changed:
                self.num_copying -= 1
                self.changed.notify_all()

    def done(self, error: OSError | None = None) -> None:
        """With one run."""
        with self.changed:
            self.num_left -= 1
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self, deadline: float) -> bool:
        """Ends it, when all is here, at an error or a cancel, or at the deadline. True: all is
        here."""
        with self.changed:
            while self.num_left and not self.error and not self.cancelled.is_set():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self.changed.wait(min(left_s, CANCEL_S))
            self.is_over = True
            self.changed.wait_for(lambda: not self.num_copying)
            return not self.num_left and not self.error


class SegmentReader:
    """`lock` guards `books`; `failed(what, error)` hears of each read that failed."""

    def __init__(
        self,
        name: str,
        page: PageGroup,
        medium: SegmentMedium,
        books: SegmentBooks,
        lock: threading.Condition,
        failed: Callable[[str, OSError], None],
    ) -> None:
        self._name = name
        self._page = page
        self._medium = medium
        self._books = books
        self._lock = lock
        self._failed = failed
        self._rests_until = 0.0
        self._run_pages = max(1, READ_BYTES // page.page_bytes)
        self._queue: queue.SimpleQueue[tuple[Run, Reading] | None] = queue.SimpleQueue()
        for number in range(medium.num_readers):
            thread = f"tier-{name}-{number}"
            threading.Thread(target=self._serve, name=thread, daemon=True).start()

    @property
    def is_resting(self) -> bool:
        """The store was late: waiting for it again would hold up every request."""
        return time.monotonic() < self._rests_until

    def close(self) -> None:
        for _ in range(self._medium.num_readers):
            self._queue.put(None)

    def read(
        self, piece: Piece, pool: LocalPool, cancelled: threading.Event, timeout_s: float
    ) -> CellSums:
        """Raises PeerGone when the store does not answer in time, KvUnavailable when it fails, and
        Cancelled."""
        deadline = time.monotonic() + timeout_s
        sums = np.empty((len(piece.source_pages), self._page.num_heads), np.uint64)
        reading = Reading(piece, pool, self._page, sums, cancelled)
        written = [
            run for run in self._runs(piece.source_pages) if not self._copy_staged(run, reading)
        ]
        reading.num_left = len(written)
        for run in written:
            self._queue.put((run, reading))
        if reading.wait(deadline):
            return sums
        if reading.error is not None:
            self._failed("cannot be read", reading.error)
            reason = reading.error.strerror or str(reading.error)
            raise KvUnavailable(f"tier {self._name}: {reason}")
        if cancelled.is_set():
            raise Cancelled("the read was cancelled")
        self._rests_until = time.monotonic() + REST_S
        self._failed("does not answer in time", TimeoutError(f"{timeout_s:g} s"))
        raise PeerGone(f"the store of tier {self._name} does not answer in time")

    def _runs(self, pages: PageIds) -> Iterator[Run]:
        order = np.argsort(pages, kind="stable")
        ordered = pages[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=-2) != 1)
        for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
            for first in range(start, end, self._run_pages):
                page = int(ordered[first])
                rows = order[first : min(end, first + self._run_pages)]
                yield Run(page >> PLACE_BITS, page % MAX_PLACES, rows)

    def _copy_staged(self, run: Run, reading: Reading) -> bool:
        """Of pages that are not written yet. False: they are."""
        with self._lock:
            segment = self._books.segments.get(run.segment)
            if segment is None:
                raise KvUnavailable(f"tier {self._name} has lost a segment")
            buffer = segment.buffer
            if buffer is None:
                return False
            segment.num_copying += 1
        try:
            reading.copy(run, buffer, run.place)
        finally:
            with self._lock:
                segment.num_copying -= 1
                self._lock.notify_all()
        return True

    def _serve(self) -> None:
        """A thread. Nothing that a store raises ends it."""
        whole = new_buffer(self._run_pages * self._page.page_bytes + 2 * ALIGNMENT)
        while (work := self._queue.get()) is not None:
            run, reading = work
            error: OSError | None = None
            try:
                self._fetch(run, reading, whole)
            except OSError as failure:
                error = failure
            except Exception as failure:  # who waits for the segment must hear of it
                _log.exception("a segment could not be read for a reason of ours", tier=self._name)
                error = OSError(errno.EIO, type(failure).__name__)
            reading.done(error)

    def _fetch(self, run: Run, reading: Reading, whole: memoryview) -> None:
        if reading.is_over:
            return
        start = run.place * self._page.page_bytes
        skipped = start % ALIGNMENT
        buffer = whole[: aligned(skipped + len(run.rows) * self._page.page_bytes)]
        self._medium.read_into(run.segment, start - skipped, buffer)
        reading.copy(run, buffer[skipped:], 0)


class SegmentLink:
    transport = "segments"

    def __init__(self, reader: SegmentReader, pool: LocalPool, cancelled: threading.Event) -> None:
        self._reader, self._pool, self._cancelled = reader, pool, cancelled

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        return self._reader.read(piece, self._pool, self._cancelled, timeout_s)

    def close(self) -> None:
        pass
