"""Pulls between workers whose pools are laid out differently: every byte in its place."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.core.errors import ConfigError, IncompatiblePeer, KvMismatch, KvUnavailable
from paceline.core.kv_layout import PAGE_TOKENS, HeadRange, head_ranges
from paceline.kernels.checksum import sum_pages_reference
from paceline.kv_transfer import registry, uneven_pull
from paceline.kv_transfer.base import LocalPool
from paceline.kv_transfer.layout_map import LayoutMap, WorkerLayout, check_layout
from paceline.kv_transfer.link_statistics import LinkStatistics
from paceline.kv_transfer.pool_memory import new_pool_file, size_pool_memory
from paceline.kv_transfer.uneven_pull import (
    Limits,
    RankSource,
    SourceBlock,
    UnevenPull,
    UnevenRun,
    staging_pool,
)
from tests.contract.ends import SETTINGS

DIM = 4
PLANES = 2
Kv = NDArray[np.float32]  # [layers, planes, heads, tokens, dim]


def layout(
    num_layers: int,
    heads: int,
    *,
    num_ranks: int = 1,
    page_blocks: int = 1,
    per_page: int | None = None,
    windows: Sequence[int] | None = None,
) -> WorkerLayout:
    """Layers that see equally far share groups of `per_page`, the last one padded."""
    seen = list(windows or [0] * num_layers)
    size = per_page or num_layers
    places: dict[int, tuple[int, int]] = {}
    groups: list[int] = []
    for window in sorted(set(seen)):
        members = [layer for layer in range(num_layers) if seen[layer] == window]
        for i, layer in enumerate(members):
            places[layer] = len(groups) + i // size, i % size
        groups += [window] * -(-len(members) // size)
    return WorkerLayout(
        "full",
        tuple(places[layer] for layer in range(num_layers)),
        tuple(groups),
        size,
        PLANES,
        DIM,
        "float32",
        head_ranges(heads, num_ranks),
        page_blocks * PAGE_TOKENS,
    )


def pools_of(worker: WorkerLayout, num_pages: int, fill: int) -> list[LocalPool]:
    made = []
    for rank in range(len(worker.ranks)):
        page = worker.page_of(rank)
        memory = size_pool_memory(new_pool_file(), num_pages * page.page_bytes)
        np.frombuffer(memory.view, np.uint8)[:] = fill
        made.append(LocalPool(memory.view, page, num_pages, memory.fd))
    return made


def values(pool: LocalPool) -> NDArray[np.float32]:
    """[pages, layers, planes, heads, tokens, dim]"""
    return np.frombuffer(pool.memory, np.float32).reshape(pool.num_pages, *pool.group.shape)


def random_kv(num_layers: int, heads: int, num_blocks: int, seed: int) -> Kv:
    shape = (num_layers, PLANES, heads, num_blocks * PAGE_TOKENS, DIM)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Source:
    """A worker whose pools hold `kv`, block i in places drawn at random."""

    def __init__(self, worker: WorkerLayout, kv: Kv, seed: int) -> None:
        self.layout = worker
        num_groups, self.num_blocks = len(worker.windows), kv.shape[3] // PAGE_TOKENS
        num_used = -(-self.num_blocks // worker.page_blocks)
        self.pools = pools_of(worker, num_groups * num_used + 5, 0x5A)
        free = np.random.default_rng(seed).permutation(self.pools[0].num_pages)
        self.pages = free[: num_groups * num_used].reshape(num_groups, num_used)
        for layer, (group, index) in enumerate(worker.layers):
            for page, tokens in enumerate(self._tokens()):
                for rank, pool in zip(worker.ranks, self.pools, strict=True):
                    part = kv[layer, :, rank.first : rank.end, tokens]
                    to = values(pool)[self.pages[group, page], index]
                    to[:, :, : part.shape[2]] = part

    def _tokens(self) -> Iterator[slice]:
        for start in range(0, self.num_blocks * PAGE_TOKENS, self.layout.page_tokens):
            yield slice(start, start + self.layout.page_tokens)

    def block(self, group: int, block: int, num_tokens: int | None = None) -> SourceBlock:
        page = int(self.pages[group, block // self.layout.page_blocks])
        sums = [
            sum_pages_reference(p.memory, np.array([page]), p.group, num_tokens) for p in self.pools
        ]
        checksums = tuple(int(s) for s in np.concatenate(sums, axis=1)[0])
        return SourceBlock(page, 1, checksums, block % self.layout.page_blocks)


@contextmanager
def connected(
    source: Source, reader: WorkerLayout, pools: list[LocalPool], transport: str = "local"
) -> Iterator[UnevenPull]:
    layouts = LayoutMap(source.layout, reader)
    with ExitStack() as stack:
        sources = []
        for theirs in source.pools:
            staging = staging_pool(source.layout)
            exported = registry.make_source(transport, theirs, SETTINGS)
            exported.start()
            stack.callback(exported.close)
            reader_of = registry.make_reader(transport, staging, SETTINGS)
            link = reader_of.connect(exported.address(), 2)
            stack.callback(link.close)
            half = staging.num_pages // 2  # its pages may begin anywhere
            sources.append(RankSource(link, staging, half or 1, 0, half))
        yield UnevenPull(layouts, sources, pools)


def limits() -> Limits:
    return Limits(time.monotonic() + 10, threading.Event(), lambda page, generation: None)


def pull_all(
    source: Source,
    reader: WorkerLayout,
    kv: Kv,
    num_tokens: int | None = None,
    transport: str = "local",
) -> None:
    """Pulls every block into every group of ours, and compares each byte of all our pools."""
    num_groups, num_blocks = len(reader.windows), source.num_blocks
    num_used = -(-num_blocks // reader.page_blocks)
    pools = pools_of(reader, num_groups * num_used + 3, 0xA5)
    expected = [values(pool).copy() for pool in pools]
    pages = np.random.default_rng(9).permutation(pools[0].num_pages)[: num_groups * num_used]
    pages = pages.reshape(num_groups, num_used)
    layouts = LayoutMap(source.layout, reader)
    used = num_tokens or PAGE_TOKENS
    places = [divmod(block, reader.page_blocks) for block in range(num_blocks)]
    with connected(source, reader, pools, transport) as pull:
        for group in range(num_groups):
            blocks = {
                theirs: [source.block(theirs, block, num_tokens) for block in range(num_blocks)]
                for theirs in layouts.source_groups(group)
            }
            to = [int(pages[group, page]) for page, _ in places]
            run = UnevenRun(group, to, blocks, num_tokens, [place for _, place in places])
            sums = pull.pull(run, LinkStatistics(pools[0].group), limits())
            again = [
                sum_pages_reference(p.memory, pages[group], p.group, num_tokens) for p in pools
            ]
            assert np.array_equal(sums, np.concatenate(again, axis=1))
    for layer, (group, index) in enumerate(reader.layers):
        for rank, held in enumerate(reader.ranks):
            for block, (page, place) in enumerate(places):
                start = block * PAGE_TOKENS
                to_tokens = slice(place * PAGE_TOKENS, place * PAGE_TOKENS + used)
                to_cells = expected[rank][pages[group, page], index]
                to_cells[:, :, to_tokens] = kv[
                    layer, :, held.first : held.end, start : start + used
                ]
    for pool, wanted in zip(pools, expected, strict=True):
        assert values(pool).tobytes() == wanted.tobytes()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[WorkerLayout, WorkerLayout, int]:
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    num_layers = draw(st.integers(1, 5))
    windows = draw(st.lists(st.sampled_from([0, 32]), min_size=num_layers, max_size=num_layers))
    one, other = (
        layout(
            num_layers,
            heads,
            num_ranks=draw(st.sampled_from([1, 2, 4, 8])),
            page_blocks=blocks,
            per_page=draw(st.integers(1, num_layers)),
            windows=windows,
        )
        for blocks in (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    )
    return one, other, heads


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs(), st.integers(1, 6), st.integers(0, 1000))
def test_each_layout_gets_the_bytes_of_each_other(
    pair: tuple[WorkerLayout, WorkerLayout, int], num_blocks: int, seed: int
) -> None:
    theirs, ours, heads = pair
    kv = random_kv(len(theirs.layers), heads, num_blocks, seed)
    pull_all(Source(theirs, kv, seed), ours, kv)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("heads", "theirs", "ours"),
    [(2, 1, 4), (2, 4, 1), (8, 1, 2), (8, 2, 1), (8, 4, 2), (8, 2, 8)],
)
def test_sglang_31295_ranks_that_share_and_repeat_heads(
    transport: str, heads: int, theirs: int, ours: int
) -> None:
    """https://github.com/sgl-project/sglang/issues/31295: groups were counted by the ratio of
    ranks, not of distinct heads, and descriptors left the region."""
    kv = random_kv(2, heads, 3, 1)
    source = Source(layout(2, heads, num_ranks=theirs), kv, 1)
    pull_all(source, layout(2, heads, num_ranks=ours), kv, transport=transport)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_vllm_42895_pages_of_32_tokens_fill_pages_of_16(transport: str) -> None:
    """https://github.com/vllm-project/vllm/issues/42895: the pair passed its check, and tokens came
    from blocks that were never filled."""
    kv = random_kv(3, 2, 5, 2)
    source = Source(layout(3, 2, page_blocks=2), kv, 2)
    pull_all(source, layout(3, 2), kv, transport=transport)
    pull_all(Source(layout(3, 2), kv, 2), layout(3, 2, page_blocks=2), kv, transport=transport)


@pytest.mark.parametrize("num_tokens", [1, 15])
def test_a_partial_page_brings_its_tokens_and_nothing_else(num_tokens: int) -> None:
    kv = random_kv(4, 4, 1, 3)
    source = Source(layout(4, 4, num_ranks=2, per_page=3), kv, 3)
    pull_all(source, layout(4, 4, per_page=2), kv, num_tokens)


def test_a_pull_of_more_than_fits_into_staging_goes_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uneven_pull, "STAGING_BYTES", 1)  # a page of each rank, of which one
    kv = random_kv(2, 2, 7, 4)
    pull_all(Source(layout(2, 2, num_ranks=2, page_blocks=3), kv, 4), layout(2, 2), kv)


def test_wrong_bytes_are_found_before_ours_are_written() -> None:
    kv = random_kv(2, 2, 2, 5)
    source = Source(layout(2, 2, num_ranks=2), kv, 5)
    blocks = [source.block(0, block) for block in range(2)]
    values(source.pools[1])[source.pages[0, 1]] += 1
    ours = layout(2, 2)
    pools = pools_of(ours, 2, 0)
    told: list[tuple[int, int]] = []
    run = UnevenRun(0, [0, 1], {0: blocks})
    given_limits = replace(
        limits(), report=lambda page, generation: told.append((page, generation))
    )
    with connected(source, ours, pools) as pull, pytest.raises(KvMismatch):
        pull.pull(run, LinkStatistics(pools[0].group), given_limits)
    assert told == [(blocks[1].page, 1)]
    assert not values(pools[0]).any()


@pytest.mark.parametrize("change", [{"block": 1}, {"checksums": (1,)}])
def test_blocks_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    kv = random_kv(1, 2, 1, 6)
    source, ours = Source(layout(1, 2), kv, 6), layout(1, 2)
    pools = pools_of(ours, 1, 0)
    block = replace(source.block(0, 0), **change)  # type: ignore[arg-type]
    with connected(source, ours, pools) as pull, pytest.raises(KvUnavailable):
        pull.pull(UnevenRun(0, [0], {0: [block]}), LinkStatistics(pools[0].group), limits())


SAME = layout(4, 4)


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (replace(SAME, page_tokens=24), "page_tokens"),
        (replace(SAME, page_tokens=0), "page_tokens"),
        (replace(SAME, page_tokens=1 << 20), "page_tokens"),
        (replace(SAME, layers_per_page=1 << 30), "layers_per_page"),
        (replace(SAME, dtype="int7"), "dtype"),
        (replace(SAME, dtype="bfloat16"), "dtype"),
        (replace(SAME, head_dim=8), "head_dim"),
        (replace(SAME, num_planes=1), "num_planes"),
        (replace(SAME, ranks=()), "ranks"),
        (replace(SAME, ranks=(HeadRange(0, 2), HeadRange(3, 1))), "ranks"),
        (replace(SAME, ranks=(HeadRange(2, 2), HeadRange(0, 2))), "ranks"),
        (replace(SAME, ranks=(HeadRange(0, 8),)), "num_heads"),
        (replace(SAME, layers=((0, 0),) * 4), "layers"),
        (replace(SAME, layers=((0, 0), (0, 1), (0, 2), (1, 0))), "layers"),
        (layout(5, 4), "num_layers"),
        (layout(4, 4, windows=[0, 0, 32, 32]), "windows"),
    ],
)
def test_what_cannot_be_paired_is_refused_by_name(theirs: WorkerLayout, field: str) -> None:
    with pytest.raises(IncompatiblePeer) as refused:
        LayoutMap(theirs, SAME)
    assert refused.value.field == field


@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (2, 5), (6, 4)])
def test_heads_that_ranks_cannot_share_are_refused(heads: int, ranks: int) -> None:
    with pytest.raises(ConfigError) as refused:
        head_ranges(heads, ranks)
    assert refused.value.field == "num_ranks"


def test_pages_that_would_take_much_memory_are_refused() -> None:
    huge = replace(SAME, head_dim=1 << 20)
    check_layout(huge)
    with pytest.raises(IncompatiblePeer) as refused:
        staging_pool(huge)
    assert refused.value.field == "page_bytes"
