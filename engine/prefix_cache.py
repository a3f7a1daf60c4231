"""Names of pages: key → page of one page group, so that a page is named (key, group).

A page is committed – named, found by others, published – only when all its tokens are accepted,
its bytes are there and its checksums are known. Committing a name that exists keeps the first
copy. A local hit compares token ids as well as keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.messages import Removed, Stored
from paceline.engine.page_pool import PagePool

PACKED_BLOCK_BYTES = PAGE_TOKENS * 8  # token ids of a block as int64


@dataclass(frozen=True, slots=True)
class Tail:
    """The partial last page of a prefilled slot: it has no name, its reader asks by slot."""

    page: int
    num_tokens: int
    checksums: tuple[int, ...]


class PrefixCache:
    """Shares the lock of its pool. `enabled=False`: names are kept for readers, never reused."""

    def __init__(self, pool: PagePool, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.tails: dict[int, Tail] = {}  # by slot
        self._page_of: dict[bytes, int] = {}
        self._events: list[Stored | Removed] = []
        pool.on_evict = self.forget

    def __len__(self) -> int:
        return len(self._page_of)

    def match(self, keys: Sequence[bytes], packed_tokens: bytes) -> list[int]:
        """Pages of the longest leading run of `keys` that is here with the same token ids."""
        if not self.enabled:
            return []
        pages: list[int] = []
        for i, key in enumerate(keys):
            page = self._page_of.get(key)
            if page is None or self.pool.pages[page].packed_tokens != packed_block(
                packed_tokens, i
            ):
                break
            pages.append(page)
        return pages

    def commit(
        self, page: int, key: bytes, packed_tokens: bytes, checksums: tuple[int, ...]
    ) -> int:
        """Names `page`, or returns the page that bears the name already."""
        with self.pool.lock:
            first = self._page_of.get(key)
            if first is not None:
                same = self.pool.pages[first].packed_tokens == packed_tokens
                return first if same else page
            self.pool.set_name(page, key, packed_tokens, checksums)
            self._page_of[key] = page
            self._publish(Stored, key)
            return page

    def forget(self, page: int) -> None:
        """Takes the name from a page: it is evicted, or its bytes are wrong."""
        with self.pool.lock:
            key = self.pool.pages[page].key
            if key is not None:
                del self._page_of[key]
                self._publish(Removed, key)
            self.pool.drop_name(page)

    def pin_run(self, keys: Sequence[bytes]) -> list[int]:
        """Pins the leading run of `keys` that is here and may be pinned."""
        pinned: list[int] = []
        with self.pool.lock:
            for key in keys:
                page = self._page_of.get(key)
                if page is None or not self.pool.pin(page):
                    break
                pinned.append(page)
        return pinned

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[Stored | Removed]:
        """What changed since the last call, in order."""
        with self.pool.lock:
            events, self._events = self._events, []
            return events

    def check_integrity(self) -> str:
        """Empty when names and pages agree."""
        with self.pool.lock:
            named = {r.key: p for p, r in enumerate(self.pool.pages) if r.key is not None}
            return "" if named == self._page_of else "names and pages disagree"

    def _publish(self, kind: type[Stored] | type[Removed], key: bytes) -> None:
        if self._events and type(self._events[-1]) is kind:
            self._events[-1].keys.append(key)
        else:
            self._events.append(kind([key]))


def packed_block(packed_tokens: bytes, block: int) -> bytes:
    return packed_tokens[block * PACKED_BLOCK_BYTES : (block + 1) * PACKED_BLOCK_BYTES]
