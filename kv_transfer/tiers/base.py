"""The contract of a tier: a source of pages in this process, found by name.

Who calls what, in which order:

    going down                                      coming back
    ----------                                      -----------
    put(batch)    pages of the pool, or of          pin(names) → what is here of them
                  the tier above that evicts        link(pool).read(piece) → sums, many
                                                    report(page, generation) when they are wrong
                                                    unpin(pin), always

What blocks: `put` takes as long as a copy in memory, whatever the tier writes to, unless told to
wait: what a slow store does not take is dropped. `read` blocks, never longer than its deadline; the
others do not.
What a failure costs: a hit. `put` and `pin` never raise; a `read` raises KvUnavailable, and
Cancelled.
Authority: a page is stored with the checksums that it was committed with. `put` compares what it
copied with them, `kv_transfer.pull` what came back; a page that is reported is deleted.
Bounds: a tier never holds more than its capacity. All calls are right in any thread.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.kv_transfer.base import CellSums, Link, LocalPool, PageIds
from paceline.kv_transfer.link_statistics import LinkStatistics


class PageName(NamedTuple):
    key: bytes
    group: int


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Pages as they lie in some memory, and what each must sum to ([pages, heads])."""

    names: Sequence[PageName]
    memory: memoryview
    pages: PageIds
    checksums: CellSums

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.pages) == len(self.checksums)

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, rows: NDArray[np.int64]) -> "PageBatch":
        """A part of it."""
        names = [self.names[row] for row in rows.tolist()]
        return PageBatch(names, self.memory, self.pages[rows], self.checksums[rows])


@dataclass(frozen=True, slots=True)
class TierPin:
    """Pages that a tier keeps readable until they are unpinned. `rows`: which of the names asked
    for, rising."""

    rows: NDArray[np.int64]
    pages: PageIds
    generations: NDArray[np.uint64]
    checksums: CellSums

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class TierFigures:
    """Counters since the start; changed under the tier's lock."""

    num_pages: int = 0  # held now
    num_hits: int = 0  # pages that were pinned
    num_stored: int = 0  # pages taken in
    num_evictions: int = 0  # pages given up for others
    num_dropped: int = 0  # pages that were not taken: no room, or the store is behind
    num_mismatches: int = 0  # pages whose bytes were not what was promised, in or out
    num_errors: int = 0  # failed operations of the store


class TierListener(Protocol):
    """Hears what a tier comes to hold and ceases to hold, in this order: it is called from any
    thread, under the tier's lock, and does not wait."""

    def stored(self, tier: str, names: Sequence[PageName]) -> None: ...

    def removed(self, tier: str, names: Sequence[PageName]) -> None: ...


class Nobody:
    """Listens to nothing."""

    def stored(self, tier: str, names: Sequence[PageName]) -> None:
        pass

    def removed(self, tier: str, names: Sequence[PageName]) -> None:
        pass


class Tier(Protocol):
    name: str  # in metrics and events
    figures: TierFigures
    statistics: LinkStatistics  # of reading

    def start(self, listener: TierListener, below: "Tier | None") -> None:
        """`below` takes what is evicted here."""
        ...

    def holds(self, name: PageName) -> bool:
        """A hint: it may be gone at the pin."""
        ...

    def touch(self, names: Sequence[PageName]) -> None:
        """They are wanted, wherever they are found: the last of them most of all."""
        ...

    def put(self, batch: PageBatch, wait_s: float = 0.0) -> NDArray[np.int64]:
        """Takes what it has room for, or comes to have within `wait_s`. Returns the rows that did
        not sum to what was promised."""
        ...

    def pin(self, names: Sequence[PageName]) -> TierPin: ...

    def unpin(self, pin: TierPin) -> None: ...

    def link(self, pool: LocalPool, cancelled: threading.Event) -> Link:
        """Reads pinned pages into `pool`. A read that waits ends soon after `cancelled` is set."""
        ...

    def report(self, page: int, generation: int) -> None:
        """A pinned page arrived wrong: it is found no more."""
        ...

    def close(self) -> None:
        """Writes out what is under way, within a few seconds, and lets go of everything."""
        ...
