import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import PAGE_TOKENS, PageGroup
from paceline.kernels import _native, checksum, pages

GOLDEN_GROUP = PageGroup("full", num_layers=3, num_heads=3, head_dim=6)
GOLDEN_WHOLE = [
    [0xDCBDFD213C439322, 0xEC106BE5EB1D887, 0x96F43574A30415B0],
    [0x59D18B92B5987C1, 0x9522091E9FE222E1, 0x5CAABE567FA8A45A],
]
GOLDEN_TAIL = [
    [0x1A00355B56C4FCAC, 0x67DB3122A9CAD696, 0x228B515D669DEDDF],
    [0xD5D586A89BC5501E, 0xE274B18C8F68434A, 0xE3B1D3F13C8469DC],
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

groups = st.builds(
    PageGroup,
    name=st.just("full"),
    num_layers=st.integers(1, 5),
    num_heads=st.integers(1, 5),
    head_dim=st.sampled_from([4, 12, 20, 28, 64, 100]),
    dtype=st.sampled_from(sorted(DTYPES)),
    num_planes=st.integers(1, 3),
)
tails = st.none() | st.integers(1, PAGE_TOKENS)


def golden_memory(num_pages: int = 2) -> bytearray:
    """Every byte from a formula that any language can repeat."""
    positions = np.arange(num_pages * GOLDEN_GROUP.page_bytes, dtype=np.uint64)
    return bytearray((positions * 2654435761 >> 13 & 0xFF).astype(np.uint8).tobytes())


def random_pool(group: PageGroup, num_pages: int, seed: int) -> NDArray[np.uint8]:
    """Random bits: as floats, all NaNs, infinities and denormals occur."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_pages, group.page_bytes), dtype=np.uint8)


def torch_sums(
    pool: NDArray[np.uint8], ids: NDArray[np.int64], group: PageGroup, num_tokens: int | None
) -> NDArray[np.uint64]:
    values = torch.from_numpy(pool).view(DTYPES[group.dtype]).view(len(pool), *group.shape)
    sums = checksum.sum_pages_torch(values, torch.from_numpy(ids), group, num_tokens)
    unsigned: NDArray[np.uint64] = sums.numpy().view(np.uint64)
    return unsigned


@pytest.mark.parametrize(("num_tokens", "golden"), [(None, GOLDEN_WHOLE), (5, GOLDEN_TAIL)])
def test_golden_vectors_hold_all_paths(num_tokens: int | None, golden: list[list[int]]) -> None:
    memory = golden_memory()
    ids = np.array([1, 0])
    pool = np.frombuffer(memory, np.uint8).reshape(2, -1)
    view = memoryview(memory)
    assert checksum.sum_pages_reference(view, ids, GOLDEN_GROUP, num_tokens).tolist() == golden
    assert pages.sum_pages(view, ids, GOLDEN_GROUP, num_tokens).tolist() == golden
    assert torch_sums(pool, ids, GOLDEN_GROUP, num_tokens).tolist() == golden


def test_key_table_is_pinned() -> None:
    table = checksum.key_table()
    assert [hex(k) for k in table[:3]] == ["0xa7358371", "0x3f6b3f5d", "0x680d8a4f"]
    assert int(table.sum(dtype=np.uint64)) == 8783234674577


def test_formula_in_plain_integers() -> None:
    """The docstring's formula, word by word, where indices into K wrap."""
    group = PageGroup("full", num_layers=2, num_heads=1, head_dim=640)
    pool = random_pool(group, 1, seed=3)
    words = pool.view("<u8").reshape(group.num_runs, -1)
    key = [int(k) for k in checksum.key_table()]
    total = 0
    for run, cell in enumerate(words.tolist()):
        for i, word in enumerate(cell):
            low = (word % 2**32 + key[(2 * i + 8 * run) % 4096]) % 2**32
            high = ((word >> 32) + key[(2 * i + 1 + 8 * run) % 4096]) % 2**32
            total = (total + low * high) % 2**64
    ids = np.array([0])
    assert checksum.sum_pages_reference(pool.reshape(-1).data, ids, group).tolist() == [[total]]
    assert pages.sum_pages(pool.reshape(-1).data, ids, group).tolist() == [[total]]


@settings(max_examples=60, deadline=None)
@given(group=groups, num_tokens=tails, seed=st.integers(0, 2**32))
def test_every_path_gives_the_reference_sums(
    group: PageGroup, num_tokens: int | None, seed: int
) -> None:
    pool = random_pool(group, 3, seed)
    ids = np.array([2, 0, 2])
    memory = pool.reshape(-1).data
    reference = checksum.sum_pages_reference(memory, ids, group, num_tokens)
    assert np.array_equal(torch_sums(pool, ids, group, num_tokens), reference)
    assert np.array_equal(pages.sum_pages(memory, ids, group, num_tokens), reference)


@pytest.mark.parametrize("level", range(_native.BEST_LEVEL + 1))
@pytest.mark.parametrize("head_dim", [2, 6, 64, 1030])
def test_every_instruction_set_gives_the_reference_sums(level: int, head_dim: int) -> None:
    group = PageGroup("full", num_layers=3, num_heads=3, head_dim=head_dim)
    pool = random_pool(group, 2, seed=head_dim)
    ids = np.array([1, 0])
    for num_bytes, num_tokens in ((group.cell_bytes, None), (group.tail_bytes(3), 3)):
        sums = np.full((2, 3), 7, dtype=np.uint64)
        sizes = (group.page_bytes, group.num_runs, group.num_heads, group.cell_bytes, num_bytes)
        _native.sum_pages(pool.reshape(-1).data, ids, *sizes, sums, level)
        reference = checksum.sum_pages_reference(pool.reshape(-1).data, ids, group, num_tokens)
        assert np.array_equal(sums, reference)


def damaged(pool: NDArray[np.uint8], group: PageGroup, how: str) -> NDArray[np.uint8]:
    page = pool.copy().view(np.uint16).reshape(*group.shape)
    if how == "layers":
        page[[0, 1]] = page[[1, 0]]
    elif how == "planes":
        page[:, [0, 1]] = page[:, [1, 0]]
    elif how == "heads":
        page[:, :, [0, 1]] = page[:, :, [1, 0]]
    elif how == "tokens":
        page[:, :, :, [0, 1]] = page[:, :, :, [1, 0]]
    else:
        page[1, 1, 1, 9, 5] ^= 1 << 7
    return page.reshape(1, -1).view(np.uint8)


@pytest.mark.parametrize("how", ["layers", "planes", "heads", "tokens", "one bit"])
def test_damage_changes_the_sums(how: str) -> None:
    group = PageGroup("full", num_layers=2, num_heads=2, head_dim=12, dtype="bfloat16")
    pool = random_pool(group, 1, seed=5)
    broken = damaged(pool, group, how)
    ids = np.array([0])
    before = pages.sum_pages(pool.reshape(-1).data, ids, group)
    after = pages.sum_pages(broken.reshape(-1).data, ids, group)
    assert (before != after).any()
    assert np.array_equal(after, torch_sums(broken, ids, group, None))


def test_a_tail_counts_only_its_tokens() -> None:
    group = PageGroup("full", num_layers=2, num_heads=2, head_dim=4)
    pool = random_pool(group, 1, seed=6)
    other = pool.copy()
    other.view(np.float32).reshape(group.shape)[:, :, :, 5:] = np.nan
    ids = np.array([0])
    tail, tail_of_other = (
        pages.sum_pages(p.reshape(-1).data, ids, group, 5) for p in (pool, other)
    )
    assert np.array_equal(tail, tail_of_other)
    whole, whole_of_other = (pages.sum_pages(p.reshape(-1).data, ids, group) for p in (pool, other))
    assert (whole != whole_of_other).all()


def test_one_head_is_verified_alone() -> None:
    """A reader of half the heads compares its own columns."""
    group = PageGroup("full", num_layers=2, num_heads=4, head_dim=4)
    half = PageGroup("full", num_layers=2, num_heads=2, head_dim=4)
    pool = random_pool(group, 1, seed=8)
    own = np.ascontiguousarray(pool.view(np.float32).reshape(group.shape)[:, :, 2:])
    ids = np.array([0])
    whole = pages.sum_pages(pool.reshape(-1).data, ids, group)
    part = pages.sum_pages(own.data.cast("B"), ids, half)
    assert np.array_equal(whole[:, 2:], part)


@pytest.mark.parametrize("num_tokens", [0, -1, 17])
def test_a_tail_outside_the_page_is_refused(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"num_tokens={num_tokens}"):
        pages.sum_pages(memoryview(golden_memory()), np.array([0]), GOLDEN_GROUP, num_tokens)


def test_cells_that_are_no_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim=3"):
        PageGroup("full", num_layers=1, num_heads=1, head_dim=3)
