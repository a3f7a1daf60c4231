"""Fills the pages of one slot from the tiers, before its prompt is computed.

    Fill → pull by name, in batches (thread) → Pulled… → Filled
                                             └ the slot has ended → TransferClosed

What cannot be had in time, or not right, is computed: nothing here fails a request.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import structlog

from paceline.core.errors import Cancelled
from paceline.engine import messages
from paceline.kv_transfer.tiers.base import PageName

if TYPE_CHECKING:
    from paceline.worker.slots import SlotState
    from paceline.worker.tiering import Tiering

BATCH_PAGES = 64
TIMEOUT_S = 2.0  # that a prompt waits for its pages at most; the rest is computed

_log = structlog.get_logger("paceline.worker")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One page: where it stands in the request, and where it goes."""

    group: int
    block: int
    page: int


class TierFill:
    """Starts at once, as a task. `stop` ends it from outside, `finished` waits for its end."""

    def __init__(self, tiering: "Tiering", slot: "SlotState", fill: messages.Fill) -> None:
        self._tiering = tiering
        self._slot = slot
        self._wanted = [
            Wanted(group, block, page)
            for group, run in enumerate(fill.runs)
            for block, page in enumerate(run.pages, run.first_block)
        ]
        self._abort = threading.Event()
        self._pulling: concurrent.futures.Future[dict[int, list[int]]] | None = None
        self._task = asyncio.create_task(self._run())
        tiering.fills.add(self)
        self._task.add_done_callback(lambda _: tiering.fills.discard(self))

    def stop(self) -> bool:
        """True while a copy into the slot's pages may be in flight: `TransferClosed` follows."""
        self._abort.set()
        if self._pulling is not None:
            self._pulling.cancel()  # if no thread has begun it
        return not self._task.done()

    async def finished(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        session, number = self._tiering.session, self._slot.number
        deadline = time.monotonic() + TIMEOUT_S
        try:
            for start in range(0, len(self._wanted), BATCH_PAGES):
                batch = self._wanted[start : start + BATCH_PAGES]
                for pulled in _runs(batch, await self._came(batch, deadline), number):
                    session.send(pulled)
        except Cancelled:
            pass
        except Exception:
            _log.exception("pages could not be filled for a reason of ours")
        finally:
            over = messages.TransferClosed if self._abort.is_set() else messages.Filled
            session.send(over(number))

    async def _came(self, batch: list[Wanted], deadline: float) -> dict[int, list[int]]:
        """The sums of what came, by row. Raises Cancelled."""
        if self._abort.is_set():
            raise Cancelled("the fill was stopped")
        self._pulling = self._tiering.fill_threads.submit(self._pull, batch, deadline)
        came = asyncio.wrap_future(self._pulling)
        await asyncio.wait((came,))
        if came.cancelled():
            raise Cancelled("the fill was stopped before it began")
        return came.result()

    def _pull(self, batch: list[Wanted], deadline: float) -> dict[int, list[int]]:
        names = [PageName(self._slot.keys[wanted.block], wanted.group) for wanted in batch]
        destinations = np.array([wanted.page for wanted in batch], np.int64)
        tiering = self._tiering
        return tiering.stack.pull(names, tiering.pool, destinations, deadline, self._abort)


def _runs(batch: list[Wanted], sums: dict[int, list[int]], slot: int) -> Iterator[messages.Pulled]:
    """What came, as few messages as possible."""
    run: messages.Pulled | None = None
    for row, wanted in enumerate(batch):
        if row not in sums:
            continue
        if run is not None and (run.group, run.first_block + len(run.checksums)) == (
            wanted.group,
            wanted.block,
        ):
            run.checksums.append(sums[row])
            continue
        if run is not None:
            yield run
        run = messages.Pulled(slot, wanted.group, wanted.block, [sums[row]])
    if run is not None:
        yield run
