"""Which workers hold which blocks: a mirror, bounded in bytes.

A key (the first 16 bytes of a block key) maps to a bit mask of *views*; a view is the content of
one worker's pool at one incarnation. A lookup walks a request's keys once and keeps the mask of
the views that hold all of them so far: its cost does not grow with the number of workers.

    shard = key[0]              256 small dicts: no growth or sweep pauses the event loop
    young | old                 two generations a shard; when young is full it becomes old, and what
                                was old and unused is forgotten: LRU without a list

Retiring a view takes effect at once (its bit leaves the live mask); `sweep` clears it shard by
shard afterwards, and only then is the bit used again.
"""

import itertools
from collections.abc import Iterable, Iterator

from paceline.core.keys import INDEX_KEY_BYTES

NUM_SHARDS = 256
# A 16-byte `bytes` (49 → 64), its place in a dict (37 to 75, as it fills) and a mask that may be an
# object of its own (32). 113 bytes an entry were measured with shared masks.
ENTRY_BYTES = 160
# Blocks of a request that are looked up one by one, and most looked up beyond those, evenly spread.
# 4096 took 0.7 ms of the event loop; a hole between two of the latter makes the guess a worse one.
MATCH_EXACT, MATCH_SPREAD = 2048, 2048

View = int  # index of a bit


class PrefixIndex:
    """Not thread-safe: everything runs on the router's event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.max_keys = max(2 * NUM_SHARDS, max_bytes // ENTRY_BYTES)
        self._generation_keys = max(1, self.max_keys // (2 * NUM_SHARDS))
        self._young: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]
        self._old: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]
        self._live = 0
        self._used = 0  # live, or retired and not yet swept

    def __len__(self) -> int:
        return sum(map(len, self._young)) + sum(map(len, self._old))

    @property
    def num_bytes(self) -> int:
        return len(self) * ENTRY_BYTES

    def open(self) -> View:
        """A new, empty view. It counts in lookups from now on."""
        view = (~self._used & (self._used + 1)).bit_length() - 1
        self._used |= 1 << view
        self._live |= 1 << view
        return view

    def retire(self, view: View) -> None:
        """Forgets all of a view at once; call `sweep` some time later."""
        self._live &= ~(1 << view)

    def store(self, view: View, packed: bytes) -> None:
        """Adds keys, 16 bytes each."""
        bit = 1 << view
        for key in _split(packed):
            shard = key[0]
            young = self._young[shard]
            mask = young.get(key)
            if mask is None:
                mask = self._old[shard].pop(key, 0)
                self._insert(shard, key, mask | bit)
            elif not mask & bit:
                young[key] = mask | bit

    def remove(self, view: View, packed: bytes) -> None:
        keep = ~(1 << view)
        for key in _split(packed):
            shard = key[0]
            for generation in (self._young[shard], self._old[shard]):
                mask = generation.get(key)
                if mask is not None:
                    _set(generation, key, mask & keep)

    def match(self, packed: bytes, stride: int) -> dict[View, int]:
        """Leading blocks of a request that each view holds; views without any are left out.

        `packed` holds one key every `stride` bytes; its first 16 bytes count.
        """
        young, old = self._young, self._old
        alive, depth = self._live, 0
        found: dict[View, int] = {}
        for block in _looked_up(len(packed) // stride):
            key = packed[block * stride : block * stride + INDEX_KEY_BYTES]
            shard = key[0]
            mask = young[shard].get(key)
            if mask is None:
                mask = self._promote(old[shard], shard, key)
            if alive & ~mask:
                _record(found, alive & ~mask, depth)
                alive &= mask
                if not alive:
                    break
            depth = block + 1
        _record(found, alive, depth)
        return found

    def sweep(self) -> Iterator[None]:
        """Clears retired views, one shard a turn; free bits and memory when it is through."""
        retired = self._used & ~self._live
        if not retired:
            return
        for shard in range(NUM_SHARDS):
            for generations in (self._young, self._old):
                kept = {k: m & ~retired for k, m in generations[shard].items() if m & ~retired}
                generations[shard] = kept
            yield
        self._used &= ~retired

    def _insert(self, shard: int, key: bytes, mask: int) -> None:
        if len(self._young[shard]) >= self._generation_keys:
            self._old[shard] = self._young[shard]
            self._young[shard] = {}
        self._young[shard][key] = mask

    def _promote(self, old: dict[bytes, int], shard: int, key: bytes) -> int:
        """A key that is used again moves to the young generation."""
        mask = old.pop(key, 0)
        if mask:
            self._insert(shard, key, mask)
        return mask


def _looked_up(num_blocks: int) -> Iterable[int]:
    """In order, the last of `num_blocks` among them if they are more than can all be looked up."""
    if num_blocks <= MATCH_EXACT:
        return range(num_blocks)
    step = -(-(num_blocks - MATCH_EXACT) // MATCH_SPREAD)
    spread = range(num_blocks - 1, MATCH_EXACT - 1, -step)
    return itertools.chain(range(MATCH_EXACT), reversed(spread))


def _set(generation: dict[bytes, int], key: bytes, mask: int) -> None:
    if mask:
        generation[key] = mask
    else:
        del generation[key]


def _split(packed: bytes) -> Iterator[bytes]:
    for start in range(0, len(packed) - INDEX_KEY_BYTES + 1, INDEX_KEY_BYTES):
        yield packed[start : start + INDEX_KEY_BYTES]


def _record(found: dict[View, int], mask: int, depth: int) -> None:
    while mask and depth:
        low = mask & -mask
        found[low.bit_length() - 1] = depth
        mask ^= low
