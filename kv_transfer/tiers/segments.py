"""Tier of segments in a store: local files, or objects.

Pages are written in large runs and read by ranges. The tier gives up whole segments, the one that
was used longest ago first, before it writes another; their pages go to the tier below, if there is
one. At the start it finds what is in the store, by the index of each segment.
"""

import errno
import threading
import time
from collections.abc import Sequence

import numpy as np
import structlog
from numpy.typing import NDArray

from paceline.core.kv_layout import PageGroup
from paceline.kernels.pages import copy_pages
from paceline.kv_transfer.base import LocalPool
from paceline.kv_transfer.link_statistics import LinkStatistics
from paceline.kv_transfer.tiers.base import (
    Nobody,
    PageBatch,
    PageName,
    Tier,
    TierFigures,
    TierListener,
    TierPin,
)
from paceline.kv_transfer.tiers.medium import SegmentMedium
from paceline.kv_transfer.tiers.segment_books import MAX_PLACES, Segment, SegmentBooks
from paceline.kv_transfer.tiers.segment_format import SegmentForm, new_buffer
from paceline.kv_transfer.tiers.segment_loader import Found, SegmentLoader
from paceline.kv_transfer.tiers.segment_reader import SegmentLink, SegmentReader
from paceline.kv_transfer.tiers.segment_writer import SegmentWriter

FLUSH_AFTER_S = 2.0  # pages wait so long in memory for others to be written with
START_S = 5.0  # that a start waits for what the store holds; more of it is found while we serve
ASK_AGAIN_S = 5.0  # a store that could not be listed

_log = structlog.get_logger("paceline.tiers")


class SegmentTier:
    def __init__(
        self,
        name: str,
        page: PageGroup,
        layout_digest: str,
        medium: SegmentMedium,
        capacity_bytes: int,
        segment_bytes: int,
        flush_after_s: float = FLUSH_AFTER_S,
    ) -> None:
        """Room for one page a segment at least, and for one segment."""
        self.name = name
        self.figures = TierFigures()
        self.statistics = LinkStatistics(page)
        self._page = page
        self._form = SegmentForm(layout_digest, page.page_bytes, page.num_heads)
        self._medium = medium
        self._capacity_bytes = capacity_bytes
        self._is_failing = False
        self._lock = threading.Condition()
        self._books = SegmentBooks(page.num_heads)
        max_pages = self._form.max_pages(min(segment_bytes, capacity_bytes))
        assert 0 < max_pages < MAX_PLACES, "the configuration has checked it"
        self._writer = SegmentWriter(
            self._form,
            max_pages,
            flush_after_s,
            self._books,
            self._lock,
            self._write,
            self._lose,
        )
        self._reader = SegmentReader(name, page, medium, self._books, self._lock, self._failed)
        self._is_loaded = False  # until then no pages are taken: their numbers may be taken
        self._is_closing = threading.Event()
        self._loading = threading.Thread(target=self._load, name=f"tier-{name}-load", daemon=True)
        self._listener: TierListener = Nobody()
        self._below: Tier | None = None

    def start(self, listener: TierListener, below: Tier | None) -> None:
        self._listener, self._below = listener, below
        self._loading.start()
        self._loading.join(START_S)
        self._writer.start()

    def holds(self, name: PageName) -> bool:
        return name in self._books.page_of and not self._reader.is_resting

    def touch(self, names: Sequence[PageName]) -> None:
        with self._lock:
            self._books.touch(names)

    def put(self, batch: PageBatch, wait_s: float = 0.0) -> NDArray[np.int64]:
        deadline = time.monotonic() + wait_s
        held = self._books.page_of
        rows = np.array([i for i, n in enumerate(batch.names) if n not in held], np.int64)
        wrong: list[NDArray[np.int64]] = []
        if not self._is_loaded:
            self._count_dropped(len(rows))
            return rows[:0]
        with self._writer.open_lock:
            while len(rows):
                segment = self._writer.open_segment(max(0.0, deadline - time.monotonic()))
                if segment is None:
                    self._count_dropped(len(rows))
                    break
                room = self._writer.max_pages - len(segment.names)
                wrong.append(self._stage(segment, batch, rows[:room]))
                rows = rows[room:]
                self._writer.added()
        return np.concatenate(wrong) if wrong else rows[:0]

    def pin(self, names: Sequence[PageName]) -> TierPin:
        with self._lock:
            pin = self._books.pin([] if self._reader.is_resting else names)
            self.figures.num_hits += len(pin)
        return pin

    def unpin(self, pin: TierPin) -> None:
        with self._lock:
            self._books.unpin(pin.pages)

    def link(self, pool: LocalPool, cancelled: threading.Event) -> SegmentLink:
        return SegmentLink(self._reader, pool, cancelled)

    def report(self, page: int, generation: int) -> None:
        with self._lock:
            name = self._books.forget(page)
            if name is None:
                return
            self.figures.num_mismatches += 1
            self.figures.num_pages -= 1
            self._listener.removed(self.name, [name])

    def is_settled(self) -> bool:
        """All that was put is in the store, or lost."""
        with self._lock:
            return all(segment.buffer is None for segment in self._books.segments.values())

    def close(self) -> None:
        self._is_closing.set()
        self._writer.close()
        self._reader.close()
        self._medium.close()

    # --- down ---

    def _stage(
        self, segment: Segment, batch: PageBatch, rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Copies rows to the end of the open segment; returns those that are wrong: they stay there
        without a name, and with the checksums that they do not have."""
        assert segment.buffer is not None
        first = len(segment.names)
        places = np.arange(first, first + len(rows))
        sums = copy_pages(segment.buffer, batch.memory, places, batch.pages[rows], self._page)
        is_right = (sums == batch.checksums[rows]).all(axis=1)
        stored = []
        with self._lock:
            segment.sums[places] = batch.checksums[rows]
            for place, row, right in zip(places.tolist(), rows.tolist(), is_right, strict=True):
                segment.names.append(batch.names[row])
                if right and self._books.name_page(segment, place):
                    stored.append(batch.names[row])
            self.figures.num_pages += len(stored)
            self.figures.num_stored += len(stored)
            self.figures.num_mismatches += int((~is_right).sum())
            self._listener.stored(self.name, stored)
        wrong: NDArray[np.int64] = rows[~is_right]
        return wrong

    def _write(self, segment: Segment, data: memoryview) -> bool:
        """In the writer's thread. False: the store has not taken it."""
        has_room, reuse = self._make_room(len(data))
        if not has_room:
            return False
        try:
            self._store(segment.number, data, reuse)
        except OSError as error:
            self._failed("does not take pages", error)
            with self._lock:
                self._books.discard(segment.number, len(data))
            self._delete(segment.number)
            return False
        self._is_failing = False
        with self._lock:
            segment.num_bytes = len(data)
            self._books.num_bytes += len(data)
        return True

    def _store(self, number: int, data: memoryview, reuse: int | None) -> None:
        """In the place of one more segment where the disk is full before our capacity is."""
        try:
            self._medium.write(number, data, reuse)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if reuse is not None:
                self._delete(reuse)
            reuse = self._give_up_one()
            if reuse is None:
                raise
            self._medium.write(number, data, reuse)
        if reuse is not None:
            with self._lock:
                self._books.deleted(reuse)

    def _make_room(self, num_bytes: int) -> tuple[bool, int | None]:
        """Whether there is room for so many bytes, and the number of the segment whose place they
        take. Gives up segments for it; none while the store keeps one that was given up before."""
        books = self._books
        while (missing := books.num_bytes + num_bytes - self._capacity_bytes) > 0:
            number = next(iter(books.unwanted)) if books.unwanted else self._give_up_one()
            if number is None:
                return False, None  # all else is being read
            if books.unwanted[number] >= missing:
                return True, number
            if not self._delete(number):
                return False, None
        return True, None

    def _give_up_one(self) -> int | None:
        """The number of the one that was used longest ago, now unwanted. None: none may go."""
        with self._lock:
            segment = self._books.oldest()
            if segment is None:
                return None
            places = self._books.named(segment)
            names = self._books.remove(segment)
            self.figures.num_evictions += len(names)
            self.figures.num_pages -= len(names)
            self._listener.removed(self.name, names)
        try:
            if self._below is not None and places:
                self._demote(segment, places)
        except OSError as error:
            self._failed("cannot be read", error)
        return segment.number

    def _demote(self, segment: Segment, places: list[tuple[int, PageName]]) -> None:
        assert self._below is not None
        buffer = new_buffer(self._form.data_bytes(len(segment.names)))
        self._medium.read_into(segment.number, 0, buffer)
        pages = np.array([place for place, _ in places], np.int64)
        names = [name for _, name in places]
        self._below.put(PageBatch(names, buffer, pages, segment.sums[pages]))

    def _lose(self, segment: Segment) -> None:
        with self._lock:
            names = self._books.remove(segment)
            self.figures.num_dropped += len(names)
            self.figures.num_pages -= len(names)
            self._listener.removed(self.name, names)

    def _load(self) -> None:
        """A thread: a store that is slow or away now holds up nobody."""
        loader = SegmentLoader(
            self.name, self._medium, self._form, self._failed, is_over=self._is_closing
        )
        while (found := loader.load()) is None:
            if self._is_closing.wait(ASK_AGAIN_S):
                return
        self._is_failing = False
        self._take_over_all(found)
        self._is_loaded = True

    def _take_over_all(self, found: Found) -> None:
        """What is in the store; what is no segment of ours is deleted."""
        for number, num_bytes in found.foreign.items():
            with self._lock:
                self._books.discard(number, num_bytes)
            self._delete(number)
        for segment in found.segments:
            self._take_over(segment)
        _, too_much = self._make_room(0)
        if too_much is not None:
            self._delete(too_much)

    def _take_over(self, segment: Segment) -> None:
        with self._lock:
            self._books.add(segment)
            places = range(len(segment.names))
            named = [segment.names[i] for i in places if self._books.name_page(segment, i)]
            self.figures.num_pages += len(named)
            self._listener.stored(self.name, named)

    def _delete(self, number: int) -> bool:
        """Of one that is unwanted. False: it stays, counts, and is tried again when room is
        needed."""
        try:
            self._medium.delete(number)
        except OSError as error:
            self._failed("does not give up pages", error)
            return False
        with self._lock:
            self._books.deleted(number)
        return True

    def _failed(self, what: str, error: OSError) -> None:
        """Says so in the log once, until it works again."""
        with self._lock:
            self.figures.num_errors += 1
        if not self._is_failing:
            self._is_failing = True
            _log.warning(f"a tier {what}", tier=self.name, error=error.strerror or str(error))

    def _count_dropped(self, num_pages: int) -> None:
        with self._lock:
            self.figures.num_dropped += num_pages
