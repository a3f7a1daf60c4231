"""Which bytes of a source's pools are which bytes of ours, when the two are laid out differently.

Both are seen as cells of one hash block: 16 tokens of one (layer, plane, head), contiguous in any
layout, because cells are token-major and pages hold whole hash blocks:

    page[layer][plane][head][block][token][dim]
                            └── one cell ──┘

Workers may differ in how many heads a rank holds (and which it repeats), how many hash blocks a
page has, which layers share a page, and how many pages there are. What KV means, and so what a cell
holds, is the content digest's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import IncompatiblePeer
from paceline.core.kv_layout import ELEMENT_BYTES, PAGE_TOKENS, HeadRange, PageGroup

Cells = NDArray[np.int64]  # numbers of cells in the memory of a rank's pool

MAX_PAGE_BLOCKS = 64
MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """Where the KV of a model lies in the pools of a worker, one a rank.

    `layers`: of each layer its page group, and its index in a page; `windows`: by page group;
    `name`: by which transports know the form of its pages."""

    name: str
    layers: tuple[tuple[int, int], ...]
    windows: tuple[int, ...]
    layers_per_page: int
    num_planes: int
    head_dim: int
    dtype: str
    ranks: tuple[HeadRange, ...]
    page_tokens: int = PAGE_TOKENS

    @property
    def page_blocks(self) -> int:
        return self.page_tokens // PAGE_TOKENS

    @property
    def num_heads(self) -> int:
        return max(rank.end for rank in self.ranks)

    @property
    def cell_bytes(self) -> int:
        return PAGE_TOKENS * self.head_dim * ELEMENT_BYTES[self.dtype]

    def page_of(self, rank: int) -> PageGroup:
        """The form of a page of that rank, whatever its group."""
        heads = self.ranks[rank].count
        sizes = (self.layers_per_page, heads, self.head_dim, self.dtype, self.num_planes)
        return PageGroup(self.name, *sizes, page_tokens=self.page_tokens)

    def layers_of(self, group: int) -> list[int]:
        return [layer for layer, (owner, _) in enumerate(self.layers) if owner == group]

    def cells(
        self, rank: int, layer: int, heads: HeadRange, pages: Sequence[int], blocks: Sequence[int]
    ) -> Cells:
        """[places, planes, heads] of one layer: block `blocks[i]` of page `pages[i]` of its group,
        for each i."""
        held = self.ranks[rank]
        assert held.first <= heads.first and heads.end <= held.end
        _, index = self.layers[layer]
        page, block = (np.asarray(n, np.int64)[:, None, None] for n in (pages, blocks))
        plane = np.arange(self.num_planes)[None, :, None]
        head = np.arange(heads.first, heads.end)[None, None, :] - held.first
        run = (page * self.layers_per_page + index) * self.num_planes + plane
        return (run * held.count + head) * self.page_blocks + block


@dataclass(frozen=True, slots=True)
class Share:
    """Heads that one rank here takes from one rank there."""

    source_rank: int
    rank: int
    heads: HeadRange


@dataclass(frozen=True, slots=True)
class LayoutMap:
    source: WorkerLayout
    reader: WorkerLayout

    def __post_init__(self) -> None:
        """Raises IncompatiblePeer for layouts of which one cannot be had from the other."""
        check_layout(self.source)
        fields = ("num_planes", "head_dim", "dtype", "num_heads")
        for field in fields:
            _check_equal(field, getattr(self.reader, field), getattr(self.source, field))
        _check_equal("num_layers", len(self.reader.layers), len(self.source.layers))
        seen = [[w.windows[group] for group, _ in w.layers] for w in (self.reader, self.source)]
        _check_equal("windows", *seen)

    def source_groups(self, group: int) -> list[int]:
        """Page groups of the source that hold layers of ours."""
        return sorted({self.source.layers[layer][0] for layer in self.reader.layers_of(group)})

    @property
    def shares(self) -> list[Share]:
        """Each head of each rank here once; of ranks there that repeat it, from the first."""
        found: list[Share] = []
        for rank, ours in enumerate(self.reader.ranks):
            next_head = ours.first
            for source_rank, theirs in enumerate(self.source.ranks):
                if theirs.first <= next_head < theirs.end and next_head < ours.end:
                    end = min(theirs.end, ours.end)
                    heads = HeadRange(next_head, end - next_head)
                    found.append(Share(source_rank, rank, heads))
                    next_head = end
            assert next_head == ours.end, "check_layout has seen that all heads are there"
        return found


def check_layout(layout: WorkerLayout) -> None:
    """Raises IncompatiblePeer for one that a peer has described and that cannot be."""
    blocks, rest = divmod(layout.page_tokens, PAGE_TOKENS)
    whole = rest == 0 and 1 <= blocks <= MAX_PAGE_BLOCKS
    _check("page_tokens", layout.page_tokens, whole, f"must be a multiple of {PAGE_TOKENS}")
    _check("dtype", layout.dtype, layout.dtype in ELEMENT_BYTES, "is not known")
    _check("ranks", len(layout.ranks), 1 <= len(layout.ranks) <= MAX_RANKS, "are too many or none")
    most = len(layout.layers)
    fits = 1 <= layout.layers_per_page <= most
    _check("layers_per_page", layout.layers_per_page, fits, f"must lie between 1 and {most}")
    in_order = [rank.first for rank in layout.ranks]
    ends = 0
    for rank in layout.ranks:
        fits = rank.count > 0 and rank.first <= ends
        _check("ranks", in_order, fits and in_order == sorted(in_order), "leave heads out")
        ends = max(ends, rank.end)
    for group, index in layout.layers:
        fits = 0 <= group < len(layout.windows) and 0 <= index < layout.layers_per_page
        _check("layers", (group, index), fits, "lies in no page")
    _check("layers", len(layout.layers), len(set(layout.layers)) == len(layout.layers), "overlap")


def _check(field: str, value: object, holds: bool, reason: str) -> None:
    if not holds:
        raise IncompatiblePeer(f"{field}={value!r} of the source {reason}", field=field)


def _check_equal(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise IncompatiblePeer(f"{field}: {ours!r} here, {theirs!r} at the source", field=field)
