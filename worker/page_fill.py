"""Fills the pages of one slot from outside, before its prompt is computed.

    Fill → from one origin after the other → Pulled… → Filled
                                           └ the slot has ended → TransferClosed

What cannot be had in time, or not right, is computed: nothing here fails a request.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import structlog

from paceline.core.errors import Cancelled
from paceline.engine import messages

if TYPE_CHECKING:
    from paceline.worker.session import Session
    from paceline.worker.slots import SlotState

Tell = Callable[[messages.Pulled], None]

_log = structlog.get_logger("paceline.worker")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One page: where it stands in the request, and where it goes."""

    group: int
    block: int
    page: int


class Origin(Protocol):
    """Where pages may come from: the tiers of this worker, another worker."""

    @property
    def is_copying(self) -> bool:
        """A copy may be writing, though `pull` has returned."""

    async def pull(self, wanted: Sequence[Wanted], tell: Tell) -> None:
        """Tells of each page that lies verified in its place, until no more can be had. Raises
        Cancelled once it was stopped."""

    def stop(self) -> None:
        """Begins no more copies."""

    async def finished(self) -> None:
        """Returns once no copy is writing."""


class PageFill:
    """Starts at once, as a task. `stop` ends it from outside, `finished` waits for its end."""

    def __init__(
        self,
        session: "Session",
        slot: "SlotState",
        fill: messages.Fill,
        origins: Sequence[Origin],
    ) -> None:
        self._session = session
        self._slot = slot
        self._origins = origins
        self._left = {
            (group, block): Wanted(group, block, page)
            for group, run in enumerate(fill.runs)
            for block, page in enumerate(run.pages, run.first_block)
        }
        self._is_stopped = False
        self._task = asyncio.create_task(self._run())
        session.fills.add(self)
        self._task.add_done_callback(lambda _: session.fills.discard(self))

    def stop(self) -> bool:
        """True while a copy into the slot's pages may be in flight: `TransferClosed` follows."""
        if self._task.done():
            return False
        self._is_stopped = True
        for origin in self._origins:
            origin.stop()
        return True

    async def finished(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            for origin in self._origins:
                if self._left and not self._is_stopped:
                    await origin.pull(list(self._left.values()), self._tell)
        except Cancelled:
            pass
        except Exception:  # costs what was to be filled, not its request
            _log.exception("pages could not be filled for a reason of ours")
        finally:
            await self._end()

    async def _end(self) -> None:
        """The request does not wait for a copy that is late; its pages do."""
        number = self._slot.number
        is_copying = any(origin.is_copying for origin in self._origins)
        has_gone_on = not self._is_stopped
        if has_gone_on:
            self._session.send(messages.Filled(number, is_copying))
        for origin in self._origins:
            await origin.finished()
        if is_copying or not has_gone_on:
            self._session.send(messages.TransferClosed(number))

    def _tell(self, pulled: messages.Pulled) -> None:
        if self._is_stopped:
            raise Cancelled("the fill was stopped")
        self._session.send(pulled)
        for block in range(pulled.first_block, pulled.first_block + len(pulled.checksums)):
            self._left.pop((pulled.group, block), None)


def runs_of(
    batch: Sequence[Wanted], sums: dict[int, list[int]], slot: int
) -> Iterator[messages.Pulled]:
    """What came of `batch`, by row, in as few messages as possible."""
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
