"""Why a prompt found no room: kept, so that the next looks are cheap.

A prompt that waits is asked for at every step, and to find its cached prefix takes a walk over all
of it. What it may share of others' pages can grow in two ways since then, and both are counted: the
block after those found is named, or a page found as cached comes into use (or is evicted, and its
name given to a page in use). Until that may be enough, the prompt does not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.page_pool import PageState
from paceline.engine.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Refusal:
    """`num_blocks` leading blocks were found in all groups of full attention, in `num_shared` pages
    that were in use; `num_revived` of the pool then."""

    num_blocks: int
    num_shared: int
    num_revived: int

    @classmethod
    def now(cls, cache: PrefixCache, keys: Sequence[bytes], packed_tokens: bytes) -> "Refusal":
        pool = cache.pool
        num_blocks, runs = cache.full_runs(keys, packed_tokens)
        num_shared = sum(
            pool.pages[page].state is not PageState.CACHED for run in runs.values() for page in run
        )
        return cls(num_blocks, num_shared, pool.num_revived)

    def most_shared(self, cache: PrefixCache, keys: Sequence[bytes]) -> int | None:
        """Pages in use that the blocks of `keys` may share now, at most. None: unknown."""
        if self.num_blocks < len(keys) and cache.is_named(keys[self.num_blocks]):
            return None
        return self.num_shared + cache.pool.num_revived - self.num_revived
