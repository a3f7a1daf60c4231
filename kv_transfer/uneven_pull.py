"""A verified pull between layouts that differ: in the source's form first, then cell by cell.

    source's pages ── link of each rank, verified ──→ staging pages ── cells ──→ our pages

Staging pages are as the source's are, so any transport fills them and the source's checksums hold.
What then lies in our pages is summed anew. This costs a pass over memory more than a pull between
layouts that are alike.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.errors import IncompatiblePeer, KvUnavailable
from paceline.kernels.pages import sum_pages
from paceline.kv_transfer.base import CellSums, Link, LocalPool
from paceline.kv_transfer.layout_map import Cells, LayoutMap, WorkerLayout
from paceline.kv_transfer.link_statistics import LinkStatistics
from paceline.kv_transfer.pool_memory import new_pool_file, size_pool_memory
from paceline.kv_transfer.pull import PinnedPages, Report, pull_verified

STAGING_BYTES = 8 << 20  # of all ranks of a source, or one page of each
MAX_PAGE_BYTES = 256 << 20  # of all ranks: a peer that describes larger ones is refused


@dataclass(frozen=True, slots=True)
class SourceBlock:
    """A pinned hash block: its page, and which of the page's blocks it is."""

    page: int
    generation: int
    checksums: tuple[int, ...]  # of the page: one a KV head, rank after rank
    block: int = 0


@dataclass(frozen=True, slots=True)
class UnevenRun:
    """Blocks of one page group of ours: the page that each goes into, and, where pages of ours have
    several, its place there. `blocks`: as many, by page group of the source that holds layers of
    it."""

    group: int
    pages: Sequence[int]
    blocks: Mapping[int, Sequence[SourceBlock]]
    num_tokens: int | None = None  # of each, if it is a partial one: the first of its page
    places: Sequence[int] = ()  # empty: the first of each page


@dataclass(frozen=True, slots=True)
class RankSource:
    """How a rank of the source is read. Page p of it has the number first_page + p there, and comes
    into page first_staged + i here. Ranks whose pools are one memory share link and staging."""

    link: Link
    staging: LocalPool
    num_staged: int
    first_page: int = 0
    first_staged: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one pull: see pull_verified."""

    deadline: float
    cancelled: threading.Event
    report: Report


class UnevenPull:
    """Blocks of one source into our pools, one a rank. One pull at a time: others wait."""

    def __init__(
        self,
        layouts: LayoutMap,
        sources: Sequence[RankSource],
        pools: Sequence[LocalPool],
    ) -> None:
        self.layouts = layouts
        self.sources = sources
        self._pools = pools
        self._turn = threading.Lock()

    def pull(self, run: UnevenRun, statistics: LinkStatistics, limits: Limits) -> CellSums:
        """Returns the sums of what lies in our pages, of each once, one a KV head, rank after rank.

        Raises what pull_verified raises, KvUnavailable for blocks that the source's pages lack."""
        for blocks in run.blocks.values():
            self._check(blocks)
        most = min(source.num_staged for source in self.sources)
        with self._turn:
            for start in range(0, len(run.pages), most):
                part = slice(start, start + most)
                for group, blocks in run.blocks.items():
                    self._pull_part(run, group, blocks[part], part, statistics, limits)
        pages = np.array(list(dict.fromkeys(run.pages)), np.int64)
        sums = [sum_pages(p.memory, pages, p.group, run.num_tokens) for p in self._pools]
        return np.concatenate(sums, axis=1)

    def _check(self, blocks: Sequence[SourceBlock]) -> None:
        source = self.layouts.source
        num_sums = sum(rank.count for rank in source.ranks)
        for block in blocks:
            if len(block.checksums) != num_sums or block.block >= source.page_blocks:
                raise KvUnavailable("the source's pages are not as it has described them")

    def _pull_part(
        self,
        run: UnevenRun,
        group: int,
        blocks: Sequence[SourceBlock],
        part: slice,
        statistics: LinkStatistics,
        limits: Limits,
    ) -> None:
        known = {block.page: block for block in blocks}  # a page of several blocks comes once
        staged = {page: i for i, page in enumerate(known)}
        first_head = 0
        for rank, source in enumerate(self.sources):
            end = first_head + self.layouts.source.ranks[rank].count
            pull_verified(
                source.link,
                _pinned(source, list(known.values()), slice(first_head, end), run.num_tokens),
                statistics,
                deadline=limits.deadline,
                cancelled=limits.cancelled,
                report=_by_page_of_books(source, limits.report),
            )
            first_head = end
        pages = [staged[block.page] for block in blocks]
        self._scatter(run, group, pages, [block.block for block in blocks], part)

    def _scatter(
        self,
        run: UnevenRun,
        source_group: int,
        staged_pages: Sequence[int],
        staged_blocks: Sequence[int],
        part: slice,
    ) -> None:
        source, reader = self.layouts.source, self.layouts.reader
        num_bytes = source.cell_bytes
        if run.num_tokens is not None:
            num_bytes = self._pools[0].group.tail_bytes(run.num_tokens)
        pages = run.pages[part]
        places = run.places[part] or [0] * len(pages)
        for layer in reader.layers_of(run.group):
            if source.layers[layer][0] != source_group:
                continue
            for share in self.layouts.shares:
                staged = self.sources[share.source_rank]
                taken = [staged.first_staged + page for page in staged_pages]
                cells = source.cells(share.source_rank, layer, share.heads, taken, staged_blocks)
                to = reader.cells(share.rank, layer, share.heads, pages, places)
                copy_cells(
                    (self._pools[share.rank].memory, to),
                    (staged.staging.memory, cells),
                    source.cell_bytes,
                    num_bytes,
                )


def _by_page_of_books(source: RankSource, report: Report) -> Report:
    return lambda page, generation: report(page - source.first_page, generation)


def copy_cells(
    destination: tuple[memoryview, Cells],
    source: tuple[memoryview, Cells],
    cell_bytes: int,
    num_bytes: int,
) -> None:
    """The first `num_bytes` of each cell."""
    to, cells = (np.frombuffer(m, np.uint8) for m in (destination[0], source[0]))
    to, cells = (
        m[: len(m) // cell_bytes * cell_bytes].reshape(-1, cell_bytes) for m in (to, cells)
    )
    to[destination[1].ravel(), :num_bytes] = cells[source[1].ravel(), :num_bytes]


def staging_pool(source: WorkerLayout) -> LocalPool:
    """For pages of each rank of a source, and a last one for reads whose bytes nobody wants.
    Raises IncompatiblePeer if they are too large for that, or not alike."""
    page, num_ranks = source.page_of(0), len(source.ranks)
    if any(source.page_of(rank) != page for rank in range(num_ranks)):
        raise IncompatiblePeer("ranks: those of the source hold unequal shares", field="ranks")
    page_bytes = num_ranks * page.page_bytes
    if page_bytes > MAX_PAGE_BYTES:
        reason = f"page_bytes={page_bytes} of the source is more than {MAX_PAGE_BYTES}"
        raise IncompatiblePeer(reason, field="page_bytes")
    num_pages = num_ranks * max(1, STAGING_BYTES // page_bytes) + 1
    memory = size_pool_memory(new_pool_file(), num_pages * page.page_bytes)
    memory.close()  # nobody else maps it
    return LocalPool(memory.view, page, num_pages)


def _pinned(
    source: RankSource, blocks: Sequence[SourceBlock], heads: slice, num_tokens: int | None
) -> PinnedPages:
    return PinnedPages(
        source_pages=np.array([source.first_page + block.page for block in blocks], np.int64),
        destination_pages=np.arange(source.first_staged, source.first_staged + len(blocks)),
        generations=np.array([block.generation for block in blocks], np.uint64),
        checksums=np.array([block.checksums[heads] for block in blocks], np.uint64),
        num_tokens=num_tokens,
    )
