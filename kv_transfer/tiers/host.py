"""Tier in host memory: as many places of a page each as its capacity holds.

What is evicted goes to the tier below first. A page that is evicted or reported loses its name at
once, and its place when nobody reads it any more.
"""

import contextlib
import mmap
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.kv_layout import PageGroup
from paceline.kernels.pages import copy_pages
from paceline.kv_transfer.base import CellSums, LocalPool, PageIds, Piece
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
from paceline.kv_transfer.tiers.eviction import POLICIES

CLOSE_S = 5.0  # that `close` takes to pass on what it holds
CLOSE_PAGES = 64  # at a time


class HostTier:
    """`page` is the shape of all pages. Memory is taken from the system as it fills."""

    def __init__(self, name: str, page: PageGroup, num_places: int, eviction: str) -> None:
        self.name = name
        self.figures = TierFigures()
        self.statistics = LinkStatistics(page)
        self._page = page
        self._memory = _new_memory(num_places * page.page_bytes)
        self._policy = POLICIES[eviction](num_places)
        self._lock = threading.Lock()
        self._place_of: dict[PageName, int] = {}
        self._names: list[PageName | None] = [None] * num_places
        self._pins = [0] * num_places
        self._generations = np.zeros(num_places, np.uint64)
        self._sums = np.zeros((num_places, page.num_heads), np.uint64)
        self._free = list(range(num_places))
        self._listener: TierListener = Nobody()
        self._below: Tier | None = None

    def start(self, listener: TierListener, below: Tier | None) -> None:
        self._listener, self._below = listener, below

    def holds(self, name: PageName) -> bool:
        return name in self._place_of

    def touch(self, names: Sequence[PageName]) -> None:
        with self._lock:
            for name in names:
                if name in self._place_of:
                    self._policy.touch(name)

    def put(self, batch: PageBatch, wait_s: float = 0.0) -> NDArray[np.int64]:
        rows, places = self._take_places(batch)
        try:
            sums = copy_pages(self._memory, batch.memory, places, batch.pages[rows], self._page)
        except BaseException:
            with self._lock:
                self._free += places.tolist()
            raise
        is_right = (sums == batch.checksums[rows]).all(axis=1)
        stored = []
        with self._lock:
            for row, place, right in zip(rows.tolist(), places.tolist(), is_right, strict=True):
                name = batch.names[row]
                if right and name not in self._place_of:
                    self._settle(name, place, batch.checksums[row])
                    stored.append(name)
                else:
                    self._free.append(place)
            self.figures.num_stored += len(stored)
            self.figures.num_mismatches += int((~is_right).sum())
            self._listener.stored(self.name, stored)
        wrong: NDArray[np.int64] = rows[~is_right]
        return wrong

    def pin(self, names: Sequence[PageName]) -> TierPin:
        with self._lock:
            found = [(row, self._place_of[n]) for row, n in enumerate(names) if n in self._place_of]
            for row, place in reversed(found):  # a prefix is found only from its beginning
                self._pins[place] += 1
                self._policy.touch(names[row])
            self.figures.num_hits += len(found)
            rows, places = np.array(found, np.int64).reshape(-1, 2).T
            return TierPin(rows, places, self._generations[places], self._sums[places])

    def unpin(self, pin: TierPin) -> None:
        with self._lock:
            self._unpin(pin.pages)

    def link(self, pool: LocalPool, cancelled: threading.Event) -> "HostLink":
        return HostLink(self._memory, self._page, pool)

    def report(self, page: int, generation: int) -> None:
        with self._lock:
            name = self._names[page]
            if name is None or int(self._generations[page]) != generation:
                return
            assert self._pins[page], "only pinned pages are read"
            self._policy.remove(name)
            self._forget(name)
            self.figures.num_mismatches += 1
            self._listener.removed(self.name, [name])

    def close(self) -> None:
        """Passes what it holds to the tier below, which may keep it; the newest first."""
        if self._below is None:
            return
        deadline = time.monotonic() + CLOSE_S
        with self._lock:
            names = list(reversed(self._place_of))
        for start in range(0, len(names), CLOSE_PAGES):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            part = names[start : start + CLOSE_PAGES]
            pin = self.pin(part)
            self._demote([part[row] for row in pin.rows.tolist()], pin.pages, left_s)
            self.unpin(pin)

    def _take_places(self, batch: PageBatch) -> tuple[NDArray[np.int64], PageIds]:
        """Places for the rows that are new here, later ones first: a chain ages from its end."""
        with self._lock:
            fresh = self._fresh_rows(batch.names)
            names, places = self._evict(len(fresh) - len(self._free))
        if names:
            self._let_go(names, places)
        with self._lock:
            num_taken = min(len(fresh), len(self._free))
            taken = [self._free.pop() for _ in range(num_taken)]
            self.figures.num_dropped += len(fresh) - num_taken
        rows = np.array(fresh[:num_taken][::-1], np.int64)
        return rows, np.array(taken, np.int64)

    def _fresh_rows(self, names: Sequence[PageName]) -> list[int]:
        """Rows of names that are new here, once each; the others are the last to be evicted."""
        fresh: dict[PageName, int] = {}
        for row, name in enumerate(names):
            if name in self._place_of:
                self._policy.touch(name)
            else:
                fresh.setdefault(name, row)
        return list(fresh.values())

    def _evict(self, num_pages: int) -> tuple[list[PageName], PageIds]:
        """Up to `num_pages` pages, without their names, pinned until they are passed on."""
        names: list[PageName] = []
        places: list[int] = []
        while len(names) < num_pages:
            name = self._policy.evict(lambda name: not self._pins[self._place_of[name]])
            if name is None:
                break
            names.append(name)
            places.append(self._place_of[name])
            self._forget(name)
            self._pins[places[-1]] += 1
        self.figures.num_evictions += len(names)
        self._listener.removed(self.name, names)
        return names, np.array(places, np.int64)

    def _let_go(self, names: list[PageName], places: PageIds) -> None:
        self._demote(names, places)
        with self._lock:
            self._unpin(places)

    def _demote(self, names: list[PageName], places: PageIds, wait_s: float = 0.0) -> None:
        """Of pinned pages."""
        if self._below is not None and names:
            batch = PageBatch(names, self._memory, places, self._sums[places])
            self._below.put(batch, wait_s)

    def _unpin(self, places: PageIds) -> None:
        for place in places.tolist():
            self._pins[place] -= 1
            if not self._pins[place] and self._names[place] is None:
                self._free.append(place)

    def _settle(self, name: PageName, place: int, checksums: CellSums) -> None:
        self._place_of[name] = place
        self._names[place] = name
        self._generations[place] += 1
        self._sums[place] = checksums
        self._policy.add(name)
        self.figures.num_pages += 1

    def _forget(self, name: PageName) -> None:
        self._names[self._place_of.pop(name)] = None
        self.figures.num_pages -= 1


class HostLink:
    transport = "host"

    def __init__(self, memory: memoryview, page: PageGroup, pool: LocalPool) -> None:
        self._memory, self._page, self._pool = memory, page, pool

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        return copy_pages(
            self._pool.memory,
            self._memory,
            piece.destination_pages,
            piece.source_pages,
            self._page,
            piece.num_tokens,
        )

    def close(self) -> None:
        pass


def _new_memory(num_bytes: int) -> memoryview:
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)
