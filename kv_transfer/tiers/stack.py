"""The tiers of a worker, in order: pages go down from one to the next, and come back from any."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import DeadlineExceeded, KvMismatch, KvUnavailable
from paceline.kv_transfer.base import LocalPool, PageIds
from paceline.kv_transfer.pull import PinnedPages, pull_verified
from paceline.kv_transfer.tiers.base import PageBatch, PageName, Tier, TierListener, TierPin

MAX_ATTEMPTS = 3  # at one tier: one wrong page fails a pull, and is gone at the next pin


class TierStack:
    """Thread-safe. `tiers`: at least one."""

    def __init__(self, tiers: Sequence[Tier], listener: TierListener) -> None:
        self.tiers = tuple(tiers)
        below: Tier | None = None
        for tier in reversed(self.tiers):  # one that starts may pass pages on
            tier.start(listener, below)
            below = tier

    def holds(self, name: PageName) -> bool:
        return any(tier.holds(name) for tier in self.tiers)

    def touch(self, names: Sequence[PageName]) -> None:
        for tier in self.tiers:
            tier.touch(names)

    def put(self, batch: PageBatch) -> NDArray[np.int64]:
        """Into the first tier. Returns the rows whose bytes are not what they are said to be."""
        return self.tiers[0].put(batch)

    def pull(
        self,
        names: Sequence[PageName],
        pool: LocalPool,
        destinations: PageIds,
        deadline: float,
        cancelled: threading.Event,
    ) -> dict[int, list[int]]:
        """Copies pages by name, each from the first tier that has it right. Blocks, at most a
        little past `deadline` (time.monotonic()).

        Returns the sums of those that came, by row. Raises Cancelled, and never for a page that
        cannot be had. Afterwards nothing writes into the pool any more.
        """
        pull = _Pull(names, pool, destinations, deadline, cancelled)
        for tier in self.tiers:
            pull.take_from(tier)
        return pull.came

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


@dataclass(frozen=True, slots=True)
class _Pull:
    """Fills `came` from one tier after the other."""

    names: Sequence[PageName]
    pool: LocalPool
    destinations: PageIds
    deadline: float
    cancelled: threading.Event
    came: dict[int, list[int]] = field(default_factory=dict)

    def take_from(self, tier: Tier) -> None:
        for _ in range(MAX_ATTEMPTS):
            left = [row for row in range(len(self.names)) if row not in self.came]
            if not left or time.monotonic() > self.deadline or self._attempt(tier, left):
                return

    def _attempt(self, tier: Tier, left: list[int]) -> bool:
        """False: a page was wrong, and another attempt will not meet it."""
        pin = tier.pin([self.names[row] for row in left])
        rows = np.array(left, np.int64)[pin.rows]
        try:
            sums = pull_verified(
                tier.link(self.pool, self.cancelled),
                _pinned_pages(pin, self.destinations[rows]),
                tier.statistics,
                deadline=self.deadline,
                cancelled=self.cancelled,
                report=tier.report,
            )
        except KvMismatch:
            return False
        except (KvUnavailable, DeadlineExceeded):
            return True
        finally:
            tier.unpin(pin)
        self.came.update(zip(rows.tolist(), sums.tolist(), strict=True))
        return True


def _pinned_pages(pin: TierPin, destinations: PageIds) -> PinnedPages:
    return PinnedPages(
        source_pages=pin.pages,
        destination_pages=destinations,
        generations=pin.generations,
        checksums=pin.checksums,
    )
