"""What this incarnation's pool and the tiers hold by name, and what of it Redis has not been told.

Bounded: events that Redis cannot take in time are dropped, and one resync (`cleared`, then the
whole set) replaces them.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.keys import INDEX_KEY_BYTES
from paceline.engine.messages import Removed, Stored
from paceline.rpc.redis_schema import DEVICE, MAX_EVENT_KEYS, Kind

MAX_WAITING_EVENTS = 4096


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """`keys` change in one tier; CLEARED: in all, and there are none."""

    kind: Kind
    tier: str
    keys: list[bytes]


class IndexEvents:
    """`add` from the step events and the tiers; the writer takes batches, and says `lost` when it
    failed. `inherited`: of the incarnation before, whose tiers live on."""

    def __init__(self, inherited: "IndexEvents | None" = None) -> None:
        held = {} if inherited is None else inherited.keys
        self.keys: dict[str, set[bytes]] = {**held, DEVICE: set()}
        self._waiting: deque[IndexEvent] = deque()
        self._needs_resync = True  # a new incarnation begins with an empty pool
        self._sequence = 0

    def __bool__(self) -> bool:
        return self._needs_resync or bool(self._waiting)

    def add(self, event: Stored | Removed, tier: str = DEVICE) -> None:
        keys = [key[:INDEX_KEY_BYTES] for key in event.keys]
        held = self.keys.setdefault(tier, set())
        if isinstance(event, Stored):
            held.update(keys)
            self._queue(Kind.STORED, tier, keys)
        else:
            held.difference_update(keys)
            self._queue(Kind.REMOVED, tier, keys)

    def lost(self) -> None:
        """What was taken may not have arrived."""
        self._waiting.clear()
        self._needs_resync = True

    def take(self) -> Iterator[IndexEvent]:
        """All that waits, in order; the iterator must be used up or `lost` called."""
        if self._needs_resync:
            self._waiting.clear()
            self._needs_resync = False
            yield IndexEvent(Kind.CLEARED, DEVICE, [])
            for tier, held in list(self.keys.items()):
                yield from _chunks(Kind.STORED, tier, list(held))
        while self._waiting:
            yield self._waiting.popleft()

    def next_sequence(self) -> int:
        """Rises by one an event; a number that got lost on the way makes readers resync."""
        self._sequence += 1
        return self._sequence

    def _queue(self, kind: Kind, tier: str, keys: list[bytes]) -> None:
        if self._needs_resync:
            return
        self._waiting.extend(_chunks(kind, tier, keys))
        if len(self._waiting) > MAX_WAITING_EVENTS:
            self.lost()


def _chunks(kind: Kind, tier: str, keys: list[bytes]) -> Iterator[IndexEvent]:
    for start in range(0, len(keys), MAX_EVENT_KEYS):
        yield IndexEvent(kind, tier, keys[start : start + MAX_EVENT_KEYS])
