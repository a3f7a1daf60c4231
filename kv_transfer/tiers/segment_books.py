"""Which pages lie in which segment. Not thread-safe: its tier holds a lock.

The number of a page is (number of its segment, place in it), packed; segments are never written
again, so it is never used twice.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.kv_transfer.base import CellSums, PageIds
from paceline.kv_transfer.tiers.base import PageName, TierPin

PLACE_BITS = 20
MAX_PLACES = 1 << PLACE_BITS
MAX_NUMBER = 1 << 40  # of a segment that is found: those after it must fit, too


@dataclass(slots=True, eq=False)
class Segment:
    """`names[place]`. `buffer` holds the pages until they are written."""

    number: int
    sums: CellSums  # [places, heads]
    names: list[PageName] = field(default_factory=list)
    buffer: memoryview | None = None
    num_copying: int = 0  # readers of `buffer`
    num_bytes: int = 0  # in the store; 0: not yet
    num_pins: int = 0
    staged_at: float = 0.0


class SegmentBooks:
    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.segments: OrderedDict[int, Segment] = OrderedDict()  # least recently used first
        self.page_of: dict[PageName, int] = {}
        self.unwanted: dict[int, int] = {}  # number → bytes that are in the store until deleted
        self.num_bytes = 0  # in the store, with the unwanted
        self._next_number = 0

    def new_number(self) -> int:
        self._next_number += 1
        return self._next_number

    def add(self, segment: Segment) -> None:
        self.segments[segment.number] = segment
        self.num_bytes += segment.num_bytes
        self._next_number = max(self._next_number, segment.number)

    def name_page(self, segment: Segment, place: int) -> bool:
        """False: another page bears the name already."""
        page = segment.number << PLACE_BITS | place
        return self.page_of.setdefault(segment.names[place], page) == page

    def remove(self, segment: Segment) -> list[PageName]:
        """Returns the names that are gone with it. What the store holds of it is unwanted."""
        del self.segments[segment.number]
        if segment.num_bytes:
            self.unwanted[segment.number] = segment.num_bytes
        gone = [name for place, name in self.named(segment)]
        for name in gone:
            del self.page_of[name]
        return gone

    def discard(self, number: int, num_bytes: int) -> None:
        """What the store holds, or may hold, and nobody wants."""
        self.unwanted[number] = num_bytes
        self.num_bytes += num_bytes
        if number <= MAX_NUMBER:
            self._next_number = max(self._next_number, number)

    def deleted(self, number: int) -> None:
        """One that was unwanted is in the store no more."""
        self.num_bytes -= self.unwanted.pop(number)

    def named(self, segment: Segment) -> list[tuple[int, PageName]]:
        """Places of a segment that are found by name."""
        first = segment.number << PLACE_BITS
        return [
            (place, name)
            for place, name in enumerate(segment.names)
            if self.page_of.get(name) == first | place
        ]

    def forget(self, page: int) -> PageName | None:
        """Takes the name from one page."""
        segment = self.segments.get(page >> PLACE_BITS)
        name = None if segment is None else segment.names[page % MAX_PLACES]
        if name is None or self.page_of.get(name) != page:
            return None
        del self.page_of[name]
        return name

    def oldest(self) -> Segment | None:
        """Of those that are written and not read at the moment."""
        free = (s for s in self.segments.values() if s.num_bytes and not s.num_pins)
        return next(free, None)

    def touch(self, names: Sequence[PageName]) -> None:
        """The segment of the last of them is the last to go."""
        pages = [self.page_of[n] for n in reversed(names) if n in self.page_of]
        for number in reversed(dict.fromkeys(page >> PLACE_BITS for page in pages)):
            self.segments.move_to_end(number)

    def pin(self, names: Sequence[PageName]) -> TierPin:
        found = [(row, self.page_of[n]) for row, n in enumerate(names) if n in self.page_of]
        rows, pages = np.array(found, np.int64).reshape(-1, 2).T
        sums: list[NDArray[np.uint64]] = []
        for page in pages.tolist():
            segment = self.segments[page >> PLACE_BITS]
            segment.num_pins += 1
            sums.append(segment.sums[page % MAX_PLACES])
        self.touch(names[::-1])  # a prefix is found only from its beginning
        generations = (pages >> PLACE_BITS).astype(np.uint64)
        checksums = np.array(sums, np.uint64).reshape(-1, self.num_heads)
        return TierPin(rows, pages, generations, checksums)

    def unpin(self, pages: PageIds) -> None:
        for page in pages.tolist():
            if segment := self.segments.get(page >> PLACE_BITS):
                segment.num_pins -= 1
