"""Blocks of a simulated worker: what is counted adds up, whatever happens."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sim.cache import BlockCache
from paceline.sim.trace import HASH_BLOCKS


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.integers(3, 12))
def test_pages_add_up_and_published_changes_tell_the_content(seed: int, num_blocks: int) -> None:
    chance = random.Random(seed)
    cache = BlockCache(HASH_BLOCKS * num_blocks)
    running: list[tuple[tuple[int, ...], int]] = []
    known: set[int] = set()
    for _ in range(40):
        if running and chance.random() < 0.5:
            cache.release(*running.pop(chance.randrange(len(running))))
        else:
            start = 10 * chance.randrange(3)
            blocks = tuple(range(start, start + chance.randrange(1, 4)))
            private = chance.randrange(3)
            if cache.num_free_pages < HASH_BLOCKS * len(blocks) + private:
                continue
            held = blocks[: cache.num_cached_tokens(blocks) // 512]
            cache.hold(held, private)
            cache.store(blocks, held)
            running.append((blocks, private))
        for stored, block in cache.changes:
            assert (block in known) != stored
            known.symmetric_difference_update({block})
        cache.changes.clear()
        in_use = {block for blocks, _ in running for block in blocks}
        private = sum(pages for _, pages in running)
        assert cache.num_free_pages == cache.num_pages - HASH_BLOCKS * len(in_use) - private
        assert in_use <= known and HASH_BLOCKS * len(known) + private <= cache.num_pages


def test_the_least_recently_used_goes_first() -> None:
    cache = BlockCache(3 * HASH_BLOCKS)
    for block in (1, 2, 3):
        cache.store((block,), ())
        cache.release((block,), 0)
    cache.hold((1,), 0)
    cache.store((4,), ())
    assert [cache.num_cached_tokens((b,)) > 0 for b in (1, 2, 3, 4)] == [True, False, True, True]
