import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.core.kv_layout import PAGE_TOKENS, PageGroup
from paceline.kernels import _native, pages
from paceline.kernels.checksum import sum_pages_reference

GROUP = PageGroup("full", num_layers=2, num_heads=3, head_dim=8)
NUM_PAGES = 6


def pool(group: PageGroup, seed: int | None = None) -> NDArray[np.uint8]:
    """Page-major pool [pages, page bytes]: random, or full of NaN."""
    if seed is None:
        return np.full((NUM_PAGES, group.page_bytes), 0xFF, dtype=np.uint8)
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (NUM_PAGES, group.page_bytes), dtype=np.uint8)


def memory(array: NDArray[np.uint8]) -> memoryview:
    return array.reshape(-1).data


@settings(max_examples=60, deadline=None)
@given(
    head_dim=st.sampled_from([2, 6, 8, 16, 64, 130]),
    num_heads=st.integers(1, 5),
    num_layers=st.integers(1, 4),
    num_tokens=st.none() | st.integers(1, PAGE_TOKENS),
    order=st.permutations(range(NUM_PAGES)),
    seed=st.integers(0, 2**32),
)
def test_pages_arrive_where_they_belong_and_nothing_else_changes(
    head_dim: int,
    num_heads: int,
    num_layers: int,
    num_tokens: int | None,
    order: list[int],
    seed: int,
) -> None:
    group = PageGroup("full", num_layers=num_layers, num_heads=num_heads, head_dim=head_dim)
    source, destination = pool(group, seed), pool(group)
    to, source_pages = np.array(order[:3]), np.array(order[3:])
    sums = pages.copy_pages(
        memory(destination), memory(source), to, source_pages, group, num_tokens
    )
    used = group.cell_bytes if num_tokens is None else group.tail_bytes(num_tokens)
    expected = pool(group).reshape(NUM_PAGES, -1, group.cell_bytes)
    source_cells = source.reshape(NUM_PAGES, -1, group.cell_bytes)
    expected[to, :, :used] = source_cells[source_pages, :, :used]
    assert np.array_equal(destination, expected.reshape(NUM_PAGES, -1))
    reference = sum_pages_reference(memory(source), source_pages, group, num_tokens)
    assert np.array_equal(sums, reference)


@pytest.mark.parametrize("level", range(_native.BEST_LEVEL + 1))
@pytest.mark.parametrize("offset", [0, 8, 32])
@pytest.mark.parametrize("head_dim", [64, 256, 520])  # 256 and more: keys wrap within a cell
def test_every_instruction_set_copies_the_same_at_any_alignment(
    level: int, offset: int, head_dim: int
) -> None:
    group = PageGroup("full", num_layers=3, num_heads=2, head_dim=head_dim)
    source = pool(group, seed=1)
    buffer = np.zeros(source.size + 128, dtype=np.uint8)
    start = -buffer.ctypes.data % 64 + offset
    destination = buffer[start : start + source.size]
    to, ids = np.arange(NUM_PAGES), np.arange(NUM_PAGES)[::-1].copy()
    sums = np.empty((NUM_PAGES, 2), dtype=np.uint64)
    sizes = (group.page_bytes, group.num_runs, group.num_heads, group.cell_bytes, group.cell_bytes)
    _native.copy_pages(destination, memory(source), to, ids, *sizes, sums, level)
    assert np.array_equal(destination.reshape(NUM_PAGES, -1), source[::-1])
    assert np.array_equal(sums, sum_pages_reference(memory(source), ids, group))
    assert not buffer[:start].any()
    assert not buffer[start + source.size :].any()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("page", [-1, NUM_PAGES, 2**62])
def test_a_page_outside_the_pool_is_refused_before_anything_is_written(
    page: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(pages, "_native", None)
    source, destination = pool(GROUP, seed=2), pool(GROUP)
    good, bad = np.array([0, 1]), np.array([0, page])
    with pytest.raises(IndexError, match=rf"source_pages\[1\]={page}: the pool has 6 pages"):
        pages.copy_pages(memory(destination), memory(source), good, bad, GROUP)
    with pytest.raises(IndexError, match=rf"destination_pages\[1\]={page}"):
        pages.copy_pages(memory(destination), memory(source), bad, good, GROUP)
    with pytest.raises(IndexError, match=rf"pages\[1\]={page}"):
        pages.sum_pages(memory(source), bad, GROUP)
    assert np.array_equal(destination, pool(GROUP))


def test_without_a_compiler_copies_and_sums_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    source = pool(GROUP, seed=3)
    ids, to = np.array([5, 1]), np.array([0, 4])
    copies = []
    for module in (_native, None):
        monkeypatch.setattr(pages, "_native", module)
        destination = pool(GROUP)
        sums = pages.copy_pages(memory(destination), memory(source), to, ids, GROUP, 3)
        assert np.array_equal(sums, pages.sum_pages(memory(source), ids, GROUP, 3))
        copies.append(destination)
    assert np.array_equal(copies[0], copies[1])


@pytest.mark.parametrize("native", [True, False])
def test_what_lies_behind_the_last_page_is_left_alone(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a segment of a tier, whose index follows its pages."""
    if not native:
        monkeypatch.setattr(pages, "_native", None)
    source, destination = pool(GROUP, seed=6), pool(GROUP)
    segment, other = (
        np.append(array, np.full(100, 7, np.uint8)) for array in (source, pool(GROUP))
    )
    ids, to = np.array([5, 1]), np.array([0, 4])
    sums = pages.copy_pages(memory(other), memory(segment), to, ids, GROUP)
    assert np.array_equal(
        sums, pages.copy_pages(memory(destination), memory(source), to, ids, GROUP)
    )
    assert np.array_equal(other, np.append(destination, np.full(100, 7, np.uint8)))
    with pytest.raises(IndexError, match="the pool has 6 pages"):
        pages.sum_pages(memory(segment), np.array([NUM_PAGES]), GROUP)


def test_a_read_only_destination_is_refused() -> None:
    source = pool(GROUP, seed=4)
    read_only = memoryview(bytes(source.size))
    with pytest.raises(TypeError, match="read-write"):
        pages.copy_pages(read_only, memory(source), np.array([0]), np.array([0]), GROUP)


def test_sizes_that_do_not_agree_are_refused() -> None:
    source = memory(pool(GROUP, seed=5))
    ids, sums = np.array([0]), np.empty((1, 3), dtype=np.uint64)
    sizes = (GROUP.page_bytes, GROUP.num_runs, GROUP.num_heads, GROUP.cell_bytes)
    with pytest.raises(ValueError, match="must agree"):
        _native.sum_pages(source, ids, *sizes, GROUP.cell_bytes + 8, sums)
    with pytest.raises(ValueError, match="must agree"):
        _native.sum_pages(source, ids, *sizes, 4, sums)
    with pytest.raises(ValueError, match="must agree"):
        _native.sum_pages(source, ids, GROUP.page_bytes + 8, *sizes[1:], GROUP.cell_bytes, sums)
    with pytest.raises(ValueError, match="matching lengths"):
        _native.sum_pages(source, ids, *sizes, GROUP.cell_bytes, sums[:, :2].copy())


def test_other_threads_run_during_a_copy() -> None:
    """A copy of 64 MiB must not hold the interpreter: the event loop lives beside it."""
    group = PageGroup("full", num_layers=64, num_heads=8, head_dim=128)
    source = np.ones((1, group.page_bytes), dtype=np.uint8)
    ids = np.zeros(64, dtype=np.int64)
    done = threading.Event()

    def copy() -> None:
        pages.sum_pages(memory(source), ids, group)
        done.set()

    thread = threading.Thread(target=copy)
    thread.start()
    num_turns = 0
    while not done.wait(0.0005):
        num_turns += 1
    thread.join()
    assert num_turns > 3
