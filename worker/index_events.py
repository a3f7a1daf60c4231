"""What this incarnation's pool holds by name, and what of it Redis has not been told yet.

Bounded: events that Redis cannot take in time are dropped, and one resync (`cleared`, then the
whole set) replaces them.
"""

from collections import deque
from collections.abc import Iterator

from paceline.core.keys import INDEX_KEY_BYTES
from paceline.engine.messages import Removed, Stored
from paceline.rpc.redis_schema import MAX_EVENT_KEYS, Kind

MAX_WAITING_EVENTS = 4096

IndexEvent = tuple[Kind, list[bytes]]


class IndexEvents:
    """`add` from the step events; the writer takes batches, and says `lost` when it failed."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self._waiting: deque[IndexEvent] = deque()
        self._needs_resync = True  # a new incarnation begins with an empty set
        self._sequence = 0

    def __bool__(self) -> bool:
        return self._needs_resync or bool(self._waiting)

    def add(self, event: Stored | Removed) -> None:
        keys = [key[:INDEX_KEY_BYTES] for key in event.keys]
        if isinstance(event, Stored):
            self.keys.update(keys)
            self._queue(Kind.STORED, keys)
        else:
            self.keys.difference_update(keys)
            self._queue(Kind.REMOVED, keys)

    def lost(self) -> None:
        """What was taken may not have arrived."""
        self._waiting.clear()
        self._needs_resync = True

    def take(self) -> Iterator[IndexEvent]:
        """All that waits, in order; the iterator must be used up or `lost` called."""
        if self._needs_resync:
            self._waiting.clear()
            self._needs_resync = False
            yield Kind.CLEARED, []
            yield from _chunks(Kind.STORED, list(self.keys))
        while self._waiting:
            yield self._waiting.popleft()

    def next_sequence(self) -> int:
        """Rises by one an event; a number that got lost on the way makes readers resync."""
        self._sequence += 1
        return self._sequence

    def _queue(self, kind: Kind, keys: list[bytes]) -> None:
        if self._needs_resync:
            return
        self._waiting.extend(_chunks(kind, keys))
        if len(self._waiting) > MAX_WAITING_EVENTS:
            self.lost()


def _chunks(kind: Kind, keys: list[bytes]) -> Iterator[IndexEvent]:
    for start in range(0, len(keys), MAX_EVENT_KEYS):
        yield kind, keys[start : start + MAX_EVENT_KEYS]
