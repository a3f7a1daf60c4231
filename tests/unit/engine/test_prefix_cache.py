"""What can be reused, against the definition: every group has all that the next token sees."""

import hypothesis.strategies as st
from hypothesis import given

from paceline.core.kv_layout import PageGroup
from paceline.engine.page_pool import PagePool
from paceline.engine.prefix_cache import PACKED_BLOCK_BYTES, PrefixCache

NUM_BLOCKS = 12
KEYS = [bytes([block]) for block in range(NUM_BLOCKS)]
PACKED = b"".join(bytes([block]) * PACKED_BLOCK_BYTES for block in range(NUM_BLOCKS))
WINDOWS = st.sampled_from([0, 1, 16, 17, 18, 50])
HERE = st.sets(st.integers(0, NUM_BLOCKS - 1), min_size=NUM_BLOCKS - 4)


class CountingCache(PrefixCache):
    num_looks = 0

    def _find(self, group: int, block: int, *rest: object) -> int | None:
        self.num_looks += 1
        return super()._find(group, block, *rest)  # type: ignore[arg-type]


@given(groups=st.lists(st.tuples(WINDOWS, HERE), min_size=1, max_size=4))
def test_a_hit_is_the_longest_that_all_groups_can_serve(
    groups: list[tuple[int, set[int]]],
) -> None:
    layout = tuple(PageGroup("any", 1, 1, 2, window=window) for window, _ in groups)
    has_window = tuple(group.window > 0 for group in layout)
    pool = PagePool(NUM_BLOCKS * len(groups), has_window=has_window)
    cache = CountingCache(pool, layout)
    page_of: dict[tuple[int, int], int] = {}
    for i, (_, here) in enumerate(groups):
        for block in here:
            (page,) = pool.allocate(1, i) or [-1]
            cut = slice(block * PACKED_BLOCK_BYTES, (block + 1) * PACKED_BLOCK_BYTES)
            cache.commit(i, [page], [(KEYS[block], PACKED[cut], ())])
            page_of[i, block] = page

    def seen(group: int, num_blocks: int) -> list[int]:
        window = groups[group][0]
        first = max(0, 16 * num_blocks + 1 - window) if window else 0
        return [b for b in range(num_blocks) if 16 * b + 15 >= first]

    def can_serve(num_blocks: int) -> bool:
        return all(
            (i, block) in page_of for i in range(len(groups)) for block in seen(i, num_blocks)
        )

    expected = max(filter(can_serve, range(NUM_BLOCKS + 1)))
    num_blocks, hits = cache.match(KEYS, PACKED)
    assert num_blocks == expected
    assert hits == [[page_of[i, b] for b in seen(i, expected)] for i in range(len(groups))]
    assert cache.num_looks <= 2 * (NUM_BLOCKS + 1) * len(groups)
