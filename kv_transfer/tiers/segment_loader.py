"""What a store holds at the start: segments of an earlier process, found by the index of each."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import structlog

from paceline.kv_transfer.base import CellSums
from paceline.kv_transfer.tiers.base import PageName
from paceline.kv_transfer.tiers.medium import SegmentMedium
from paceline.kv_transfer.tiers.segment_books import MAX_NUMBER, Segment
from paceline.kv_transfer.tiers.segment_format import (
    ALIGNMENT,
    BadSegment,
    SegmentForm,
    aligned,
    new_buffer,
)

TAIL_BYTES = 64 << 10  # in which most indices lie: one read

_log = structlog.get_logger("paceline.tiers")


@dataclass(slots=True)
class Found:
    segments: list[Segment] = field(default_factory=list)  # oldest first
    foreign: dict[int, int] = field(default_factory=dict)  # number → bytes: no segments of ours


@dataclass(frozen=True, slots=True)
class SegmentLoader:
    """`failed(what, error)` hears of each operation that failed; the store is not asked any more
    once `is_over` is set."""

    tier: str
    medium: SegmentMedium
    form: SegmentForm
    failed: Callable[[str, OSError], None]
    is_over: threading.Event

    def load(self) -> Found | None:
        """None: the store could not be listed, or it is over."""
        found = Found()
        try:
            sizes = self.medium.sizes()
        except OSError as error:
            self.failed("cannot be listed", error)
            return None
        except Exception:  # a bug in a store's client
            _log.exception("a tier could not be listed for a reason of ours", tier=self.tier)
            return None
        waiting = deque(sizes.items())
        threads = [
            threading.Thread(
                target=self._load_some, args=(waiting, found), name="tier-loader", daemon=True
            )
            for _ in range(self.medium.num_readers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.segments.sort(key=lambda segment: segment.number)
        return None if self.is_over.is_set() else found

    def _load_some(self, waiting: "deque[tuple[int, int]]", found: Found) -> None:
        while not self.is_over.is_set():
            try:
                number, num_bytes = waiting.popleft()
            except IndexError:
                return
            segment = self._load_one(number, num_bytes)
            if segment is None:
                found.foreign[number] = num_bytes
            else:
                found.segments.append(segment)

    def _load_one(self, number: int, num_bytes: int) -> Segment | None:
        """None: it is no segment of ours. One that cannot be read counts, without pages, until its
        turn to go."""
        try:
            names, sums = self._read_index(number, num_bytes)
        except OSError as error:
            self.failed("cannot be read", error)
            names, sums = [], np.empty((0, self.form.num_heads), np.uint64)
        except BadSegment as error:
            _log.warning("not a segment", tier=self.tier, number=number, error=str(error))
            return None
        except Exception:  # a bug in a store's client: costs these pages
            _log.exception("a segment could not be looked at for a reason of ours", tier=self.tier)
            names, sums = [], np.empty((0, self.form.num_heads), np.uint64)
        return Segment(number, sums, names, num_bytes=num_bytes)

    def _read_index(self, number: int, num_bytes: int) -> tuple[list[PageName], CellSums]:
        if number > MAX_NUMBER:
            raise BadSegment("no segment gets so high a number")
        if num_bytes % ALIGNMENT or not num_bytes:
            raise BadSegment("its size is not that of a segment")
        tail = new_buffer(min(num_bytes, TAIL_BYTES))
        tail_start = num_bytes - len(tail)
        self.medium.read_into(number, tail_start, tail)
        start, length = self.form.index_place(bytes(tail), num_bytes)
        if start >= tail_start:
            raw = tail[start - tail_start :][:length]
        else:
            whole = new_buffer(aligned(length))
            self.medium.read_into(number, start, whole)
            raw = whole[:length]
        return self.form.read_index(bytes(raw), bytes(tail))
