"""Tiers of every kind, pages to put into them, and somebody who listens."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from paceline.core.kv_layout import PageGroup
from paceline.kernels.pages import sum_pages
from paceline.kv_transfer.base import LocalPool
from paceline.kv_transfer.tiers.base import PageBatch, PageName, Tier
from paceline.kv_transfer.tiers.file_medium import FileMedium
from paceline.kv_transfer.tiers.host import HostTier
from paceline.kv_transfer.tiers.medium import SegmentMedium
from paceline.kv_transfer.tiers.segment_books import MAX_PLACES, PLACE_BITS
from paceline.kv_transfer.tiers.segment_format import SegmentForm
from paceline.kv_transfer.tiers.segment_writer import NUM_BUFFERS
from paceline.kv_transfer.tiers.segments import SegmentTier
from paceline.kv_transfer.tiers.stack import TierStack
from tests.contract.pools import SMALL, make_pool, pages_of
from tests.support.waits import wait_for

LAYOUT = "layout"
NUM_PLACES = 12


@dataclass(slots=True)
class Listener:
    """What each tier holds, by what it said."""

    held: dict[str, list[PageName]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stored(self, tier: str, names: Sequence[PageName]) -> None:
        with self.lock:
            held = self.held.setdefault(tier, [])
            assert not set(held) & set(names), "stored twice"
            held.extend(names)

    def removed(self, tier: str, names: Sequence[PageName]) -> None:
        with self.lock:
            for name in names:
                self.held[tier].remove(name)


@dataclass(frozen=True, slots=True)
class TierKind:
    """How the tests make one with NUM_PLACES places, and spoil a page that it holds."""

    make: Callable[[Path], Tier]
    spoil: Callable[[Tier, PageName], None]
    num_staged: int = 0  # pages that it may hold in memory beside its capacity


def _host(eviction: str) -> TierKind:
    def spoil(tier: Tier, name: PageName) -> None:
        assert isinstance(tier, HostTier)
        tier._memory[tier._place_of[name] * SMALL.page_bytes + 40] ^= 1

    return TierKind(lambda _: HostTier("host", SMALL, NUM_PLACES, eviction), spoil)


def make_file_tier(
    folder: Path, num_pages: int = NUM_PLACES, segment_pages: int = 1
) -> SegmentTier:
    return make_segment_tier(FileMedium("path", folder), num_pages, segment_pages)


def make_segment_tier(medium: SegmentMedium, num_pages: int, segment_pages: int) -> SegmentTier:
    """Segments of `segment_pages` pages; each takes a block of 4 KiB more for its index."""
    form = SegmentForm(LAYOUT, SMALL.page_bytes, SMALL.num_heads)
    size = form.num_bytes(segment_pages)
    capacity = num_pages // segment_pages * size
    return SegmentTier("segments", SMALL, LAYOUT, medium, capacity, size, flush_after_s=0.01)


def is_settled(tier: Tier) -> bool:
    """All that was put is written, or given up."""
    return not isinstance(tier, SegmentTier) or tier.is_settled()


def file_of(folder: Path, tier: SegmentTier, name: PageName) -> tuple[Path, int]:
    """The file that holds a page, and where in it; waits until it is written."""
    page = tier._books.page_of[name]
    path = folder / "0" / f"{page >> PLACE_BITS:016x}.kv"
    wait_for(lambda: is_settled(tier))
    return path, page % MAX_PLACES * SMALL.page_bytes


def _spoil_file(tier: Tier, name: PageName) -> None:
    assert isinstance(tier, SegmentTier) and isinstance(tier._medium, FileMedium)
    path, offset = file_of(tier._medium._folder.parent, tier, name)
    with path.open("r+b") as file:
        file.seek(offset + 40)
        byte = file.read(1)[0]
        file.seek(offset + 40)
        file.write(bytes([byte ^ 1]))


KINDS = {
    "host-lru": _host("lru"),
    "host-arc": _host("arc"),
    "file": TierKind(make_file_tier, _spoil_file, num_staged=NUM_BUFFERS),
}


def page_name(number: int, group: int = 0) -> PageName:
    return PageName(number.to_bytes(32, "big"), group)


@dataclass(slots=True)
class Bench:
    """A stack of tiers between a pool of known bytes and one of NaN."""

    tiers: list[Tier]
    listener: Listener = field(default_factory=Listener)
    page: PageGroup = SMALL
    source: LocalPool = field(default_factory=lambda: make_pool(SMALL, 64, 1))
    pool: LocalPool = field(default_factory=lambda: make_pool(SMALL, 64))
    stack: TierStack = field(init=False)

    def __post_init__(self) -> None:
        self.stack = TierStack(self.tiers, self.listener)

    def batch(self, numbers: Sequence[int], group: int = 0) -> PageBatch:
        """Page i of the source as the content of name i."""
        pages = np.array(numbers, np.int64) % 64
        sums = sum_pages(self.source.memory, pages, self.page)
        return PageBatch([page_name(n, group) for n in numbers], self.source.memory, pages, sums)

    def put(self, *numbers: int, group: int = 0) -> list[int]:
        """Returns the rows that were wrong. Waits for room, so that a slow disk drops nothing."""
        return self.tiers[0].put(self.batch(numbers, group), wait_s=5).tolist()

    def pull(self, *numbers: int, group: int = 0, timeout_s: float = 5) -> list[int]:
        """The numbers that came, after a look at their bytes."""
        names = [page_name(n, group) for n in numbers]
        destinations = np.arange(len(names), dtype=np.int64)
        pages_of(self.pool)[:] = 0xFF
        deadline = time.monotonic() + timeout_s
        came = self.stack.pull(names, self.pool, destinations, deadline, threading.Event())
        for row, sums in came.items():
            expected = pages_of(self.source)[numbers[row] % 64]
            assert np.array_equal(pages_of(self.pool)[row], expected)
            assert sum_pages(self.pool.memory, np.array([row]), self.page)[0].tolist() == sums
        return [numbers[row] for row in sorted(came)]

    def check(self) -> None:
        """What tiers hold is what they said, and no more than they may."""
        for tier in self.tiers:
            assert isinstance(tier, HostTier | SegmentTier)
            with tier._lock:  # under which it tells, too
                held = self.listener.held.get(tier.name, [])
                assert len(held) == len(set(held)) == tier.figures.num_pages
                names = tier._place_of if isinstance(tier, HostTier) else tier._books.page_of
                assert set(held) == set(names)
