"""What tiers hold, told to the index: from any of their threads to the event loop."""

import asyncio
from collections.abc import Callable, Sequence

from paceline.engine.messages import Removed, Stored
from paceline.kv_transfer.tiers.base import PageName

AddEvent = Callable[[Stored | Removed, str], None]


class TierEvents:
    """As for the pool, only names of the first page group are told."""

    def __init__(self, loop: asyncio.AbstractEventLoop, add: AddEvent) -> None:
        self._loop = loop
        self._add = add

    def stored(self, tier: str, names: Sequence[PageName]) -> None:
        self._tell(tier, Stored(_keys(names)))

    def removed(self, tier: str, names: Sequence[PageName]) -> None:
        self._tell(tier, Removed(_keys(names)))

    def _tell(self, tier: str, event: Stored | Removed) -> None:
        if event.keys:
            self._loop.call_soon_threadsafe(self._add, event, tier)


def _keys(names: Sequence[PageName]) -> list[bytes]:
    return [name.key for name in names if name.group == 0]
