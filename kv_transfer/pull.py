"""A verified pull: in pieces, each compared with what the pin promised.

A piece takes at most about 20 ms of link time, so that a cancel never waits longer for the
transfer fence. A page that differs is reported to its source, which hashes it again; it is read
once more, and then given up: the caller computes it instead.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import Cancelled, DeadlineExceeded, KvMismatch
from paceline.kv_transfer.base import CellSums, Link, PageIds, Piece
from paceline.kv_transfer.link_statistics import LinkStatistics

MAX_SILENCE_S = 6.0  # of one piece: a source that is silent for longer has lost its leases anyway

_NONE = np.empty(0, np.int64)

Report = Callable[[int, int], None]  # (source page, generation) of a page that arrived wrong


@dataclass(frozen=True, slots=True)
class PinnedPages:
    """Pages that a source holds for us, what they must sum to, and where they go."""

    source_pages: PageIds
    destination_pages: PageIds
    generations: NDArray[np.uint64]
    checksums: CellSums  # [pages, heads]
    num_tokens: int | None = None  # of each page's cells; None: whole pages

    def __post_init__(self) -> None:
        parts = (self.destination_pages, self.generations, self.checksums)
        assert all(len(part) == len(self.source_pages) for part in parts)


def pull_verified(
    link: Link,
    pages: PinnedPages,
    statistics: LinkStatistics,
    *,
    deadline: float,
    cancelled: threading.Event,
    report: Report,
) -> CellSums:
    """Copies `pages` and returns their sums, which equal the promised ones. Blocks.

    `deadline` is on time.monotonic(). `cancelled` is looked at between pieces. Once this has
    returned or raised, nothing writes into the destination pages any more.
    Raises Cancelled, DeadlineExceeded, PeerGone, KvMismatch.
    """
    pull = _Pull(link, pages, statistics, deadline, cancelled)
    sums = np.empty_like(pages.checksums)
    for rows in _pieces(len(pages.source_pages), statistics):
        sums[rows], found = pull.read(rows)
        if len(found):
            wrong = rows.start + found
            for row in wrong:
                report(int(pages.source_pages[row]), int(pages.generations[row]))
            sums[wrong], found = pull.read(wrong)
            if len(found):
                page = int(pages.source_pages[wrong[found[0]]])
                raise KvMismatch(f"page {page} arrived twice with wrong checksums")
    return sums


def _pieces(num_pages: int, statistics: LinkStatistics) -> Iterator[slice]:
    start = 0
    while start < num_pages:
        end = min(num_pages, start + statistics.pages_per_piece())
        yield slice(start, end)
        start = end


@dataclass(frozen=True, slots=True)
class _Pull:
    link: Link
    pages: PinnedPages
    statistics: LinkStatistics
    deadline: float
    cancelled: threading.Event

    def read(self, rows: slice | NDArray[np.int64]) -> tuple[CellSums, NDArray[np.int64]]:
        """One piece: these rows of the pull. Returns their sums, and which of them are wrong, as
        positions in `rows`."""
        if self.cancelled.is_set():
            raise Cancelled("the pull was cancelled")
        started = time.monotonic()
        remaining = self.deadline - started
        if remaining <= 0:
            raise DeadlineExceeded("no time is left to pull KV")
        pages = self.pages
        piece = Piece(pages.source_pages[rows], pages.destination_pages[rows], pages.num_tokens)
        sums = self.link.read(piece, min(remaining, MAX_SILENCE_S))
        wrong = _wrong_rows(sums, pages.checksums[rows])
        self.statistics.add_piece(piece, time.monotonic() - started, len(wrong))
        return sums, wrong


def _wrong_rows(sums: CellSums, promised: CellSums) -> NDArray[np.int64]:
    """All at once first: they hardly ever differ, and a page is here in 60 µs."""
    if sums.tobytes() == promised.tobytes():
        return _NONE
    return np.flatnonzero((sums != promised).any(axis=1))
