"""Pages of sequences: grants them, shares prefixes, commits blocks, lets go.

Credit: pages that an admitted request will need are promised to it, so that admission of others
cannot take them. A sequence spends its own credit first, and renews it when the pool has room.
"""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.page_pool import PagePool, PageState
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.sequence import Sequence, pages_of


@dataclass(slots=True)
class StepClock:
    """Numbers of steps: a page freed now may be written until step `launched` has retired."""

    launched: int = 0
    retired: int = 0

    @property
    def fence(self) -> int | None:
        return self.launched if self.launched > self.retired else None


class Allocator:
    """`on_page(sequence, block)` is called when a running sequence's page changes."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        clock: StepClock,
        on_page: Callable[[Sequence, int], None],
    ) -> None:
        self.pool = pool
        self.cache = cache
        self.clock = clock
        self.on_page = on_page

    def grant(
        self, sequence: Sequence, max_hit_blocks: int, credit: int, spared: int = 0
    ) -> int | None:
        """All pages of its tokens, found by name or new, and `credit`; or nothing. `spared` more
        pages must be left for others.

        Returns the number of leading blocks that were found. None: it does not fit now.
        """
        sequence.extend_keys(max_hit_blocks)
        packed = sequence.tokens[: max_hit_blocks * PAGE_TOKENS].tobytes()
        with self.pool.lock:
            hits = self.cache.match(sequence.keys[:max_hit_blocks], packed)
            num_new = pages_of(sequence.num_tokens) - len(hits)
            if self._cost(hits) + num_new + credit > self.pool.num_available - spared:
                return None
            self.pool.share(hits)
            new = self.pool.allocate(num_new)
            assert new is not None
            self.promise(sequence, credit)
        sequence.pages = hits + new
        sequence.num_computed = len(hits) * PAGE_TOKENS
        sequence.num_committed = len(hits)
        return len(hits)

    def grow(self, sequence: Sequence, window_pages: int = 0) -> bool:
        """One more page. Renews its credit by up to `window_pages` if it has none left."""
        with self.pool.lock:
            if not sequence.credit:
                self.promise(sequence, max(0, min(window_pages, self.pool.num_available)))
            spent = min(1, sequence.credit)
            pages = self.pool.allocate(1, promised=spent)
            if pages is None:
                return False
        sequence.credit -= spent
        sequence.pages += pages
        self.on_page(sequence, len(sequence.pages) - 1)
        return True

    def promise(self, sequence: Sequence, num_pages: int) -> None:
        self.pool.promise(num_pages)
        sequence.credit += num_pages

    def share_prefix(self, source: Sequence, other: Sequence) -> int | None:
        """Gives `other` the pages of `source`, from which it was forked: the full ones shared, a
        page of its own for the partial one, which has to be copied. None: there is no page."""
        num_full, num_partial = divmod(source.num_computed, PAGE_TOKENS)
        spent = min(1, other.credit) if num_partial else 0
        with self.pool.lock:
            own = self.pool.allocate(1 if num_partial else 0, promised=spent)
            if own is None:
                return None
            self.pool.share(source.pages[:num_full])
        other.credit -= spent
        other.pages = source.pages[:num_full] + own
        other.num_computed = source.num_computed
        other.num_committed = source.num_committed
        return len(own)

    def split_credit(self, source: Sequence, others: list[Sequence]) -> None:
        """Shares the credit of a group out among its choices."""
        share, rest = divmod(source.credit, len(others) + 1)
        for i, other in enumerate(others):
            other.credit = share + (1 if i < rest else 0)
            source.credit -= other.credit

    def release(self, sequence: Sequence, transfer_slot: int | None = None) -> None:
        """Lets go of all its pages and its credit."""
        with self.pool.lock:
            self.pool.release(sequence.pages, self.clock.fence, transfer_slot)
            self.promise(sequence, -sequence.credit)
        sequence.pages = []
        sequence.num_computed = 0
        sequence.num_committed = 0

    def commit(self, sequence: Sequence, block: int, checksums: tuple[int, ...]) -> None:
        """Names a full, computed block. If the name exists its sequence takes the first copy."""
        page = sequence.pages[block]
        sequence.extend_keys(block + 1)
        packed = sequence.tokens[block * PAGE_TOKENS : (block + 1) * PAGE_TOKENS].tobytes()
        with self.pool.lock:
            if self.pool.pages[page].key is not None:
                return
            named = self.cache.commit(page, sequence.keys[block], packed, checksums)
            if named == page:
                return
            self.pool.share([named])
            self.pool.release([page], self.clock.fence)
        sequence.pages[block] = named
        self.on_page(sequence, block)

    def _cost(self, hits: list[int]) -> int:
        """Pages that sharing `hits` takes from those available."""
        return sum(self.pool.pages[page].state is PageState.CACHED for page in hits)
