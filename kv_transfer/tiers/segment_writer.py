"""Writes segments behind: pages gather in memory, and go out in one large write.

    put → the open segment → full, or old enough → thread → store
                                                     └ not taken: its pages are dropped

There are a few buffers, no more: while the store is behind and all are full, pages are not taken.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import structlog

from paceline.kv_transfer.tiers.segment_books import Segment, SegmentBooks
from paceline.kv_transfer.tiers.segment_format import SegmentForm, new_buffer

NUM_BUFFERS = 3  # one fills, one is written, one waits
CLOSE_S = 10.0  # that `close` waits for the store

_log = structlog.get_logger("paceline.tiers")


class SegmentWriter:
    """`write(segment, data)` runs in the thread, with the whole segment as bytes, then, when it was
    not taken, `lose(segment)`. `lock` guards `books`; `open_lock` is held by whoever adds pages to
    the open segment."""

    def __init__(
        self,
        form: SegmentForm,
        max_pages: int,
        flush_after_s: float,
        books: SegmentBooks,
        lock: threading.Condition,
        write: Callable[[Segment, memoryview], bool],
        lose: Callable[[Segment], None],
    ) -> None:
        self.open_lock = threading.Lock()
        self.max_pages = max_pages
        self._form = form
        self._flush_after_s = flush_after_s
        self._books = books
        self._lock = lock
        self._write = write
        self._lose = lose
        self._free = [new_buffer(form.num_bytes(max_pages)) for _ in range(NUM_BUFFERS)]
        self._open: Segment | None = None
        self._full: deque[Segment] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="tier-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def open_segment(self, wait_s: float) -> Segment | None:
        """One with room, for the holder of `open_lock`. None: none within `wait_s`."""
        if self._open is not None:
            return self._open
        with self._lock:
            self._lock.wait_for(lambda: bool(self._free) or self._is_closing, wait_s)
            if self._is_closing or not self._free:
                return None
            sums = np.zeros((self.max_pages, self._form.num_heads), np.uint64)
            number = self._books.new_number()
            self._open = Segment(number, sums, buffer=self._free.pop())
            self._open.staged_at = time.monotonic()
            self._books.add(self._open)
            return self._open

    def added(self) -> None:
        """Pages came to the open segment; `open_lock` is held."""
        with self._lock:
            if self._open is not None and len(self._open.names) == self.max_pages:
                self._full.append(self._open)
                self._open = None
            self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            self._is_closing = True
            self._lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (segment := self._next()) is not None:
            assert segment.buffer is not None
            buffer = segment.buffer
            if not self._is_taken(segment, buffer):
                self._lose(segment)
            with self._lock:
                segment.buffer = None
                while segment.num_copying:
                    self._lock.wait()
                self._free.append(buffer)
                self._lock.notify_all()

    def _is_taken(self, segment: Segment, buffer: memoryview) -> bool:
        """By the store. Nothing that it raises ends the thread."""
        try:
            sums = segment.sums[: len(segment.names)]
            return self._write(segment, self._form.seal(buffer, segment.names, sums))
        except Exception:  # costs this segment, not the thread
            _log.exception("a segment could not be written for a reason of ours")
            return False

    def _next(self) -> Segment | None:
        """The next segment to write, when there is one; None at the end."""
        while True:
            with self._lock:
                while not self._is_due():
                    self._lock.wait(self._until_due())
                if self._full:
                    return self._full.popleft()
                if self._is_closing and self._open is None:
                    return None
            with self.open_lock, self._lock:
                if self._open is not None and self._is_due():
                    self._full.append(self._open)
                    self._open = None

    def _is_due(self) -> bool:
        until = self._until_due()
        return bool(self._full) or self._is_closing or (until is not None and until <= 0)

    def _until_due(self) -> float | None:
        if self._open is None:
            return None
        return self._open.staged_at + self._flush_after_s - time.monotonic()
