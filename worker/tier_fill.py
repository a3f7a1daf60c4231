"""Pages of one slot from the tiers of this worker."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import Cancelled
from paceline.kv_transfer.tiers.base import PageName
from paceline.worker.page_fill import Tell, Wanted, runs_of

if TYPE_CHECKING:
    from paceline.worker.slots import SlotState
    from paceline.worker.tiering import Tiering

BATCH_PAGES = 64
TIMEOUT_S = 2.0  # that a prompt waits for its pages at most; the rest is computed


class TierOrigin:
    """Pulls by name, in batches, in a thread."""

    def __init__(self, tiering: "Tiering", slot: "SlotState") -> None:
        self._tiering = tiering
        self._slot = slot
        self._abort = threading.Event()
        self._pulling: concurrent.futures.Future[dict[int, list[int]]] | None = None

    @property
    def is_copying(self) -> bool:
        return self._pulling is not None and not self._pulling.done()

    async def pull(self, wanted: Sequence[Wanted], tell: Tell) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        for start in range(0, len(wanted), BATCH_PAGES):
            batch = wanted[start : start + BATCH_PAGES]
            for pulled in runs_of(batch, await self._came(batch, deadline), self._slot.number):
                tell(pulled)

    def stop(self) -> None:
        self._abort.set()
        if self._pulling is not None:
            self._pulling.cancel()  # if no thread has begun it

    async def finished(self) -> None:
        if self._pulling is not None and not self._pulling.done():
            await asyncio.wait((asyncio.wrap_future(self._pulling),))

    async def _came(self, batch: Sequence[Wanted], deadline: float) -> dict[int, list[int]]:
        """The sums of what came, by row. Raises Cancelled."""
        if self._abort.is_set():
            raise Cancelled("the fill was stopped")
        self._pulling = self._tiering.fill_threads.submit(self._pull, batch, deadline)
        came = asyncio.wrap_future(self._pulling)
        await asyncio.wait((came,))
        if came.cancelled():
            raise Cancelled("the fill was stopped before it began")
        return came.result()

    def _pull(self, batch: Sequence[Wanted], deadline: float) -> dict[int, list[int]]:
        names = [PageName(self._slot.keys[wanted.block], wanted.group) for wanted in batch]
        destinations = np.array([wanted.page for wanted in batch], np.int64)
        tiering = self._tiering
        return tiering.stack.pull(names, tiering.pool, destinations, deadline, self._abort)
