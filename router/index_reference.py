"""Which views hold a block, in plain Python: what router/_native.c does, and what a source tree
without a compiler works with, slower and with four times the memory.

    shard = first byte of the key    256 of them, so that no growth and no sweep pauses anyone
    young | old                      two generations a shard; when young is full it becomes old, and
                                     what was old and unused is forgotten: LRU without a list

Masks have bit i for view i; as arguments they are little-endian bytes.
"""

from collections.abc import Iterator

from paceline.core.keys import INDEX_KEY_BYTES

NUM_SHARDS = 256
_DICT_BYTES = 113  # an entry of a dict of `bytes` and small integers, measured


class BlockTable:
    def __init__(self, max_bytes: int) -> None:
        self._generation_keys = max(1, max_bytes // (2 * NUM_SHARDS * _DICT_BYTES))
        self._young: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]
        self._old: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]
        self._forgotten = 0

    def __len__(self) -> int:
        return sum(map(len, self._young)) + sum(map(len, self._old))

    @property
    def max_keys(self) -> int:
        """Then what was not used for long is forgotten."""
        return 2 * NUM_SHARDS * self._generation_keys

    @property
    def num_bytes(self) -> int:
        return len(self) * _DICT_BYTES

    def store(self, view: int, packed: bytes) -> tuple[int, bytes]:
        """Adds keys, 16 bytes each. Returns how many are new to the view, and their XOR."""
        bit, count, digest = 1 << view, 0, 0
        for key in _split(packed):
            mask = self._look_up(key)
            if not mask & bit:
                self._insert(key, mask | bit)
                count, digest = count + 1, digest ^ int.from_bytes(key)
        return count, digest.to_bytes(INDEX_KEY_BYTES)

    def remove(self, view: int, packed: bytes) -> tuple[int, bytes]:
        """Takes keys away. Returns how many the view had, and their XOR."""
        bit, count, digest = 1 << view, 0, 0
        for key in _split(packed):
            for generation in (self._young[key[0]], self._old[key[0]]):
                mask = generation.pop(key, 0)
                if mask & bit:
                    count, digest = count + 1, digest ^ int.from_bytes(key)
                if mask & ~bit:
                    generation[key] = mask & ~bit
        return count, digest.to_bytes(INDEX_KEY_BYTES)

    def match(self, packed: bytes, stride: int, live: bytes) -> dict[int, int]:
        """Leading blocks that each view of `live` holds; views without any are left out.

        `packed` holds one key every `stride` bytes; its first 16 bytes count.
        """
        alive, depth = int.from_bytes(live, "little"), 0
        found: dict[int, int] = {}
        for start in range(0, len(packed) - INDEX_KEY_BYTES + 1, stride):
            if not alive:
                break
            mask = self._look_up(packed[start : start + INDEX_KEY_BYTES])
            _record(found, alive & ~mask, depth)
            alive &= mask
            depth += 1
        _record(found, alive, depth)
        return found

    def sweep(self, shard: int, retired: bytes) -> None:
        """Takes the views of `retired` out of one shard."""
        keep = ~int.from_bytes(retired, "little")
        for generations in (self._young, self._old):
            kept = {key: mask & keep for key, mask in generations[shard].items() if mask & keep}
            generations[shard] = kept

    def take_forgotten(self) -> bytes:
        """Views that lost keys to the bound since the last call."""
        mask, self._forgotten = self._forgotten, 0
        return mask.to_bytes(-(-mask.bit_length() // 8), "little")

    def _look_up(self, key: bytes) -> int:
        """Who holds it; a key that is used again moves to the young generation."""
        mask = self._young[key[0]].get(key, 0)
        if not mask and (mask := self._old[key[0]].pop(key, 0)):
            self._insert(key, mask)
        return mask

    def _insert(self, key: bytes, mask: int) -> None:
        shard = key[0]
        if key not in self._young[shard] and len(self._young[shard]) >= self._generation_keys:
            for lost in self._old[shard].values():
                self._forgotten |= lost
            self._old[shard] = self._young[shard]
            self._young[shard] = {}
        self._young[shard][key] = mask


def _split(packed: bytes) -> Iterator[bytes]:
    for start in range(0, len(packed) - INDEX_KEY_BYTES + 1, INDEX_KEY_BYTES):
        yield packed[start : start + INDEX_KEY_BYTES]


def _record(found: dict[int, int], mask: int, depth: int) -> None:
    while mask and depth:
        low = mask & -mask
        found[low.bit_length() - 1] = depth
        mask ^= low
