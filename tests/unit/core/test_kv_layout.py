"""How layers are cut into page groups, and what a window sees."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from paceline.core.kv_layout import MAX_PADDING, layout_of


def sizes(*windows: int) -> list[tuple[int, int]]:
    """(window, layers in a page) of each group."""
    groups = layout_of(windows, 2, 8, "float32").groups
    return [(group.window, group.num_layers) for group in groups]


def test_layers_that_see_equally_far_are_one_group() -> None:
    assert sizes(*[0] * 30) == [(0, 30)]
    assert sizes(*[4096] * 32) == [(4096, 32)]


def test_groups_of_families() -> None:
    gemma2 = [4096, 0] * 13
    assert sizes(*gemma2) == [(0, 13), (4096, 13)]
    gemma3_1b = [0 if (layer + 1) % 6 == 0 else 512 for layer in range(26)]
    assert sizes(*gemma3_1b) == [(0, 4)] + [(512, 4)] * 6  # the last has room for two more
    gemma3_4b = [0 if (layer + 1) % 6 == 0 else 1024 for layer in range(34)]
    assert sizes(*gemma3_4b) == [(0, 5)] + [(1024, 5)] * 6
    assert sizes(0, 0, 0, 20, 20, 20, 20) == [(0, 1)] * 3 + [(20, 1)] * 4


@given(windows=st.lists(st.sampled_from([0, 16, 100]), min_size=1, max_size=60))
def test_every_layer_has_a_place_of_its_own(windows: list[int]) -> None:
    layout = layout_of(windows, 2, 8, "float32")
    assert len(set(layout.layers)) == len(windows)
    for layer, (group, index) in enumerate(layout.layers):
        assert layout.groups[group].window == windows[layer]
        assert 0 <= index < layout.page.num_layers
        assert layout.layers_of(group)[index] == layer
    assert len({group.page_bytes for group in layout.groups}) == 1
    num_places = len(layout.groups) * layout.page.num_layers
    assert num_places - len(windows) <= MAX_PADDING * num_places


@pytest.mark.parametrize(
    ("window", "position", "block"),
    [(0, 999, 0), (1, 15, 0), (1, 16, 1), (17, 31, 0), (16, 31, 1), (20, 35, 1), (20, 34, 0)],
)
def test_the_first_block_that_a_token_sees(window: int, position: int, block: int) -> None:
    group = layout_of([window], 2, 8, "float32").page
    assert group.first_block(position) == block


def test_the_digest_says_where_layers_lie() -> None:
    digests = {layout_of(w, 2, 8, "float32").digest for w in ([0, 9], [9, 0], [0, 8], [0, 0])}
    assert len(digests) == 4
