"""The tiers of a worker, in order: pages go down from one to the next, and come back from any."""

import threading
import time
from collections.abc import Sequence

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
        for tier, below in zip(self.tiers, (*self.tiers[1:], None), strict=True):
            tier.start(listener, below)

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
        came: dict[int, list[int]] = {}
        for tier in self.tiers:
            for _ in range(MAX_ATTEMPTS):
                left = [row for row in range(len(names)) if row not in came]
                if not left or time.monotonic() > deadline:
                    return came
                pin = tier.pin([names[row] for row in left])
                rows = np.array(left, np.int64)[pin.rows]
                try:
                    pages = _pinned_pages(pin, destinations[rows])
                    link = tier.link(pool)
                    sums = pull_verified(
                        link,
                        pages,
                        tier.statistics,
                        deadline=deadline,
                        cancelled=cancelled,
                        report=tier.report,
                    )
                    came.update(zip(rows.tolist(), sums.tolist(), strict=True))
                    break
                except KvMismatch:
                    continue
                except (KvUnavailable, DeadlineExceeded):
                    break
                finally:
                    tier.unpin(pin)
        return came

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def _pinned_pages(pin: TierPin, destinations: PageIds) -> PinnedPages:
    return PinnedPages(
        source_pages=pin.pages,
        destination_pages=destinations,
        generations=pin.generations,
        checksums=pin.checksums,
    )
