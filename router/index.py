"""Which workers hold which blocks: a mirror, bounded in bytes.

A *view* is the content of one tier of one worker at one incarnation. The table maps a key (the
first 16 bytes of a block key) to the bit mask of the views that hold it, 64 views an entry. A
lookup walks a request's keys once for each 64 views and stops where none of them holds on, so that
holes count; slots are fetched ahead, and 512 blocks take less time than searching for the ends.

Retiring a view takes effect at once (its bit leaves the live mask); `sweep` clears it shard by
shard afterwards, and only then is the bit used again. One sweep is under way at a time, whoever
drives it: a bit is free when its own sweep has passed all shards.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.core.keys import INDEX_KEY_BYTES
from paceline.router.index_reference import NUM_SHARDS
from paceline.rpc.redis_schema import Digest

if TYPE_CHECKING:
    from paceline.router._native import BlockTable
else:
    try:
        from paceline.router._native import BlockTable
    except ImportError:  # a source tree without a compiler still works, slower
        from paceline.router.index_reference import BlockTable

MAX_VIEWS = 1 << 14
_ALL_VIEWS = (1 << MAX_VIEWS) - 1
_GROUP_BYTES = 8  # masks go to the table in words of 64 views

View = int  # index of a bit


class PrefixIndex:
    """Not thread-safe: everything runs on the router's event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._table = BlockTable(max_bytes)
        self.max_keys = self._table.max_keys
        self._live = 0
        self._live_mask = b""
        self._used = 0  # live, or retired and not yet swept
        self._digests: dict[View, Digest] = {}
        self._incomplete = 0  # views that lost keys to the bound
        self._sweeping = 0  # retired views of the sweep that is under way
        self._num_swept = 0  # shards that it has passed

    def __len__(self) -> int:
        """Entries: a block counts once for each 64 views among which it has holders."""
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes

    def open(self) -> View:
        """A new, empty view. It counts in lookups from now on."""
        if self._used == _ALL_VIEWS:
            for _ in self.sweep():
                pass
        view = (~self._used & (self._used + 1)).bit_length() - 1
        assert view < MAX_VIEWS, "whoever opens views bounds those that are open"
        self._used |= 1 << view
        self._digests[view] = Digest()
        self._set_live(self._live | 1 << view)
        return view

    def retire(self, view: View) -> None:
        """Forgets all of a view at once; call `sweep` some time later."""
        del self._digests[view]
        self._set_live(self._live & ~(1 << view))

    def store(self, view: View, packed: bytes) -> None:
        """Adds keys, 16 bytes each."""
        count, xor = self._table.store(view, packed)
        self._digests[view] = self._digests[view].changed(count, int.from_bytes(xor))

    def remove(self, view: View, packed: bytes) -> None:
        count, xor = self._table.remove(view, packed)
        self._digests[view] = self._digests[view].changed(-count, int.from_bytes(xor))

    def digest(self, view: View) -> Digest | None:
        """Of what was stored and not removed; None: the bound made it forget some of that."""
        self._note_forgotten()
        return None if self._incomplete >> view & 1 else self._digests[view]

    def match(self, packed: bytes, stride: int = INDEX_KEY_BYTES) -> dict[View, int]:
        """Leading blocks of a request that each view holds; views without any are left out.

        `packed` holds one key every `stride` bytes; its first 16 bytes count.
        """
        return self._table.match(packed, stride, self._live_mask)

    def sweep(self) -> Iterator[None]:
        """Clears retired views, one shard a turn; free bits and memory when it is through. Goes on
        with a sweep that another has begun."""
        if not self._sweeping:
            self._sweeping = self._used & ~self._live
        while self._sweeping:
            self._table.sweep(self._num_swept, _mask(self._sweeping))
            self._num_swept += 1
            if self._num_swept == NUM_SHARDS:
                self._end_sweep()
            yield

    def _end_sweep(self) -> None:
        self._note_forgotten()
        self._incomplete &= ~self._sweeping
        self._used &= ~self._sweeping
        self._sweeping = self._num_swept = 0

    def _note_forgotten(self) -> None:
        self._incomplete |= int.from_bytes(self._table.take_forgotten(), "little")

    def _set_live(self, live: int) -> None:
        self._live = live
        self._live_mask = _mask(live)


def _mask(views: int) -> bytes:
    num_groups = -(-views.bit_length() // (8 * _GROUP_BYTES))
    return views.to_bytes(_GROUP_BYTES * num_groups, "little")
