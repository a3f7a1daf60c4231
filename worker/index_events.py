"""What this incarnation's pool and the tiers hold by name, and what of it Redis has not been told.

Bounded: events that Redis cannot take in time are dropped, and one resync (`cleared`, then the
whole set) replaces them.
"""

import functools
import operator
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.core.keys import INDEX_KEY_BYTES
from paceline.engine.messages import Removed, Stored
from paceline.rpc.redis_schema import DEVICE, MAX_EVENT_KEYS, Digest, Kind

MAX_WAITING_EVENTS = 4096


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """`keys` change in one tier; CLEARED: in all, and there are none. DIGEST: what the tier has."""

    kind: Kind
    tier: str
    keys: list[bytes]
    num_held: int = 0  # DIGEST: by all tiers together


class IndexEvents:
    """`add` from the step events and the tiers; the writer takes batches, and says `lost` when it
    failed. `inherited`: of the incarnation before, whose tiers live on."""

    def __init__(self, inherited: "IndexEvents | None" = None) -> None:
        self.keys: dict[str, set[bytes]] = {} if inherited is None else {**inherited.keys}
        self._xors: dict[str, int] = {} if inherited is None else {**inherited._xors}
        self.keys[DEVICE], self._xors[DEVICE] = set(), 0
        self._waiting: deque[IndexEvent] = deque()
        self._needs_resync = True  # a new incarnation begins with an empty pool
        self._sequence = 0

    def __bool__(self) -> bool:
        return self._needs_resync or bool(self._waiting)

    @property
    def should_be_there(self) -> bool:
        """All was told, and it is not nothing."""
        return not self and any(self.keys.values())

    def add(self, event: Stored | Removed, tier: str = DEVICE) -> None:
        keys = [key[:INDEX_KEY_BYTES] for key in event.keys]
        held = self.keys.setdefault(tier, set())
        changed = held.intersection(keys)
        if isinstance(event, Stored):
            changed = set(keys) - changed
            self._queue(Kind.STORED, tier, keys)
        else:
            self._queue(Kind.REMOVED, tier, keys)
        held ^= changed
        self._xors[tier] = self._xors.get(tier, 0) ^ _xor(changed)

    def forget_tiers(self) -> None:
        """Tiers hold nothing any more; the next incarnation begins with what they tell then."""
        self.keys = {DEVICE: self.keys[DEVICE]}
        self._xors = {DEVICE: self._xors[DEVICE]}

    def add_digests(self) -> None:
        """Readers compare what they have by then: a resync mends what differs."""
        num_held = sum(map(len, self.keys.values()))
        for tier, held in self.keys.items():
            packed = Digest(len(held), self._xors[tier]).pack()
            if not self._needs_resync:
                self._waiting.append(IndexEvent(Kind.DIGEST, tier, [packed], num_held))

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


def _xor(keys: Iterable[bytes]) -> int:
    return functools.reduce(operator.xor, map(int.from_bytes, keys), 0)


def _chunks(kind: Kind, tier: str, keys: list[bytes]) -> Iterator[IndexEvent]:
    for start in range(0, len(keys), MAX_EVENT_KEYS):
        yield IndexEvent(kind, tier, keys[start : start + MAX_EVENT_KEYS])
