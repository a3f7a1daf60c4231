"""Calls of readers, answered by a thread of their own: they never wait for a step."""

from paceline.engine.canary import Canary
from paceline.engine.messages import (
    CanaryCompared,
    CheckIntegrity,
    CompareCanary,
    Integrity,
    Pin,
    PoolCall,
    PoolReply,
    Recheck,
    Rechecked,
    Unpin,
    Unpinned,
)
from paceline.engine.page_pool import PageState
from paceline.engine.pins import pin_for_reader
from paceline.engine.pools import PageSums
from paceline.engine.prefix_cache import PrefixCache

# That one check looks at. Nobody gets a page meanwhile: about a millisecond.
CHECKED_PAGES = 2048


class PoolCalls:
    def __init__(self, cache: PrefixCache, sums: PageSums, canary: Canary | None = None) -> None:
        self.canary = canary
        self.cache = cache
        self.pool = cache.pool
        self.sums = sums
        self._next_checked = 0
        self._problem = ""

    def answer(self, call: PoolCall) -> PoolReply:
        match call:
            case Pin():
                return pin_for_reader(self.cache, call)
            case Unpin():
                with self.pool.lock:
                    for page, generation in call.pages:
                        self.pool.unpin(page, generation)
                return Unpinned()
            case Recheck():
                return self._recheck(call)
            case CheckIntegrity():
                return self._integrity()
            case CompareCanary():
                assert self.canary is not None
                return CanaryCompared(self.canary.distance(), self.canary.tolerance)

    def _recheck(self, call: Recheck) -> Rechecked:
        """Hashes outside the lock; the page is pinned meanwhile, so that it stays what it is."""
        with self.pool.lock:
            if not 0 <= call.page < self.pool.num_pages:
                return Rechecked(dropped=False, known=False)
            record = self.pool.pages[call.page]
            promised = record.checksums
            known = record.key is not None and record.generation == call.generation
            if not known or not self.pool.pin(call.page):
                return Rechecked(dropped=False, known=False)
        try:
            is_wrong = self.sums([call.page])[0] != promised
            if is_wrong:
                self.cache.forget([call.page])
        finally:
            self.pool.unpin(call.page, call.generation)
        return Rechecked(dropped=is_wrong, known=True)

    def _integrity(self) -> Integrity:
        pool, first = self.pool, self._next_checked
        pages = range(first, min(first + CHECKED_PAGES, pool.num_pages))
        is_round = pages.stop == pool.num_pages
        self._next_checked = 0 if is_round else pages.stop
        with pool.lock:
            self._problem = (
                self._problem or pool.check_integrity(pages) or self.cache.check_integrity(pages)
            )
            return Integrity(
                num_free=pool.counts[PageState.FREE],
                num_mapped=pool.counts[PageState.MAPPED],
                num_cached=pool.counts[PageState.CACHED],
                num_pinned=pool.counts[PageState.PINNED],
                num_quarantined=pool.counts[PageState.QUARANTINED],
                is_round=is_round,
                problem=self._problem,
            )
