"""Names of pages: (key, page group) → page.

A page is committed – named, found by others, published – only when all its tokens are accepted,
its bytes are there and its checksums are known. Committing a name that exists keeps the first
copy. A local hit compares token ids as well as keys.

A hit of B blocks needs all of them in groups of full attention; in a group with a window those that
the token after them sees. Only the first group is published: the index is a hint for routers, and
what a worker can use of it is decided there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.kv_layout import PAGE_TOKENS, PageGroup
from paceline.engine.messages import Removed, Stored
from paceline.engine.page_pool import PagePool

PACKED_BLOCK_BYTES = PAGE_TOKENS * 8  # token ids of a block as int64
NamedBlock = tuple[bytes, bytes, tuple[int, ...]]  # key, packed tokens, checksums


@dataclass(frozen=True, slots=True)
class Tail:
    """The partial last pages of a prefilled slot, one a group: they have no name, its reader asks
    by slot."""

    pages: tuple[int, ...]
    num_tokens: int
    checksums: tuple[tuple[int, ...], ...]


class PrefixCache:
    """Shares the lock of its pool. `enabled=False`: names are kept for readers, never reused."""

    def __init__(self, pool: PagePool, groups: tuple[PageGroup, ...], enabled: bool = True) -> None:
        self.pool = pool
        self.groups = groups
        self.enabled = enabled
        self.tails: dict[int, Tail] = {}  # by slot
        self._page_of: tuple[dict[bytes, int], ...] = tuple({} for _ in groups)
        self._events: list[Stored | Removed] = []
        pool.on_evict = self.forget

    def __len__(self) -> int:
        return sum(map(len, self._page_of))

    def match(self, keys: Sequence[bytes], packed_tokens: bytes) -> tuple[int, list[list[int]]]:
        """The most leading blocks of `keys` that can be reused, and by group the pages of those
        that the next token sees."""
        num_blocks, runs = self.full_runs(keys, packed_tokens)
        num_blocks = self._agree(num_blocks, keys, packed_tokens)
        for i, group in enumerate(self.groups):
            if group.window:
                first = self._first_of(i, num_blocks)
                runs[i] = self.run_from(i, first, keys[:num_blocks], packed_tokens)
        return num_blocks, [runs[i][:num_blocks] for i in range(len(self.groups))]

    def full_runs(
        self, keys: Sequence[bytes], packed_tokens: bytes
    ) -> tuple[int, dict[int, list[int]]]:
        """The leading blocks of `keys` that are here in all groups of full attention, and pages of
        those, or more, by group."""
        num_blocks = len(keys)
        runs: dict[int, list[int]] = {}
        for i, group in enumerate(self.groups):
            if not group.window:
                runs[i] = self.run_from(i, 0, keys[:num_blocks], packed_tokens)
                num_blocks = len(runs[i])
        return num_blocks, runs

    def is_named(self, key: bytes) -> bool:
        """Whether all groups of full attention may have this block."""
        full = [i for i, group in enumerate(self.groups) if not group.window]
        return self.enabled and all(key in self._page_of[i] for i in full)

    def run_from(
        self, group: int, first: int, keys: Sequence[bytes], packed_tokens: bytes
    ) -> list[int]:
        """Pages of the run of blocks from `first` on that are here with the same token ids."""
        pages: list[int] = []
        for block in range(first, len(keys)):
            page = self._find(group, block, keys, packed_tokens)
            if page is None:
                break
            pages.append(page)
        return pages

    def commit(self, group: int, pages: Sequence[int], named: Sequence[NamedBlock]) -> list[int]:
        """Names pages of `group`. Returns them, but for each whose name was borne already the page
        that bears it."""
        bearers, stored = [], []
        with self.pool.lock:
            names = self._page_of[group]
            for page, block in zip(pages, named, strict=True):
                key, packed_tokens, checksums = block
                first = names.get(key)
                if first is None:
                    record = self.pool.pages[page]
                    record.key, record.packed_tokens, record.checksums = block
                    names[key] = page
                    stored.append(key)
                elif self.pool.pages[first].packed_tokens == packed_tokens:
                    page = first
                bearers.append(page)
            if group == 0:
                self._publish(Stored, stored)
        return bearers

    def forget(self, pages: Sequence[int]) -> None:
        """Takes the names from pages: they are evicted, or their bytes are wrong."""
        removed = []
        with self.pool.lock:
            for page in pages:
                record = self.pool.pages[page]
                if record.key is not None:
                    del self._page_of[record.group][record.key]
                    if record.group == 0:
                        removed.append(record.key)
            self._publish(Removed, removed)
            self.pool.drop_names(pages)

    def pin_run(self, keys: Sequence[bytes], group: int = 0) -> list[int]:
        """Pins the leading run of `keys` that is here and may be pinned."""
        pinned: list[int] = []
        if not 0 <= group < len(self.groups):
            return pinned
        with self.pool.lock:
            for key in keys:
                page = self._page_of[group].get(key)
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

    def check_integrity(self, pages: range | None = None) -> str:
        """Empty when names and pages agree; of some pages, when their names lead to them."""
        with self.pool.lock:
            if pages is not None:
                return next(filter(None, map(self._name_problem, pages)), "")
            named: list[dict[bytes, int]] = [{} for _ in self.groups]
            for page, record in enumerate(self.pool.pages):
                if record.key is not None:
                    named[record.group][record.key] = page
            return "" if tuple(named) == self._page_of else "names and pages disagree"

    def _name_problem(self, page: int) -> str:
        record = self.pool.pages[page]
        if record.key is None or self._page_of[record.group].get(record.key) == page:
            return ""
        return f"the name of page {page} leads elsewhere"

    def _agree(self, num_blocks: int, keys: Sequence[bytes], packed_tokens: bytes) -> int:
        """The largest number up to `num_blocks` whose last blocks are here in every group with a
        window. Looks at each block once a group: `lows[i]` up to the end is known to be here."""
        lows = {i: num_blocks for i, group in enumerate(self.groups) if group.window}
        is_agreed = False
        while num_blocks and not is_agreed:
            is_agreed = True
            for i, low in lows.items():
                first = self._first_of(i, num_blocks)
                low = min(low, num_blocks)
                while low > first and self._find(i, low - 1, keys, packed_tokens) is not None:
                    low -= 1
                lows[i] = low
                if low > first:  # nothing that sees the block before `low` can be reused
                    num_blocks = low - 1
                    is_agreed = False
                    break
        return num_blocks

    def _first_of(self, group: int, num_blocks: int) -> int:
        """The first block that the token after `num_blocks` blocks sees."""
        return self.groups[group].first_block(num_blocks * PAGE_TOKENS)

    def _find(
        self, group: int, block: int, keys: Sequence[bytes], packed_tokens: bytes
    ) -> int | None:
        page = self._page_of[group].get(keys[block]) if self.enabled else None
        if page is None:
            return None
        packed = packed_block(packed_tokens, block)
        return page if self.pool.pages[page].packed_tokens == packed else None

    def _publish(self, kind: type[Stored] | type[Removed], keys: list[bytes]) -> None:
        if not keys:
            return
        if self._events and type(self._events[-1]) is kind:
            self._events[-1].keys.extend(keys)
        else:
            self._events.append(kind(keys))


def packed_block(packed_tokens: bytes, block: int) -> bytes:
    return packed_tokens[block * PACKED_BLOCK_BYTES : (block + 1) * PACKED_BLOCK_BYTES]
