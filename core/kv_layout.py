"""What a page of KV looks like. Everything above the kernels sees pages and cell ranges only.

A page holds PAGE_TOKENS tokens of all layers of its group in one contiguous run:

    page[layer][plane (k | v)][head][token][dim]
        └─ run = one (layer, plane): heads × cell_bytes ─┘

A cell is the contiguous range of one (layer, plane, head): token-major, so the first t tokens of
a cell are its first t / page_tokens bytes. Checksums are one 64-bit sum per (page, head).

Layers that see equally far are cut into groups of one size, so that all pages are alike and one
pool serves all groups:

    full      F F F F          group 0
    window    W W W W          group 1
              W W · ·          group 2, padded
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.keys import HASH_BLOCK_TOKENS

PAGE_TOKENS = HASH_BLOCK_TOKENS  # a page is what one name stands for
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WORD_BYTES = 8  # what checksums are made of
MAX_PADDING = 0.1  # of all layers of all groups


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers whose KV shares a page and a rule for what a prefix hit needs."""

    name: str  # "full", "window"; later "latent", "state", "draft"
    num_layers: int  # that a page has room for
    num_heads: int  # KV heads of this rank
    head_dim: int
    dtype: str = "float32"  # one of ELEMENT_BYTES
    num_planes: int = 2  # K and V
    window: int = 0  # the last tokens that a token sees, itself included; 0: all
    page_tokens: int = PAGE_TOKENS  # whole hash blocks; engines of ours make pages of one

    def __post_init__(self) -> None:
        if self.head_dim * self.element_bytes % WORD_BYTES:
            reason = f"a token of a {self.dtype} cell must fill words of {WORD_BYTES} bytes"
            raise ConfigError("head_dim", self.head_dim, reason)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def cell_bytes(self) -> int:
        return self.page_tokens * self.head_dim * self.element_bytes

    @property
    def num_runs(self) -> int:
        """(layer, plane) pairs of a page."""
        return self.num_layers * self.num_planes

    @property
    def page_bytes(self) -> int:
        return self.num_runs * self.num_heads * self.cell_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(layers, planes, heads, tokens, dim) of one page."""
        return (self.num_layers, self.num_planes, self.num_heads, self.page_tokens, self.head_dim)

    def tail_bytes(self, num_tokens: int) -> int:
        """Bytes at the start of each cell that hold its first `num_tokens` tokens."""
        return num_tokens * self.head_dim * self.element_bytes

    def first_block(self, position: int) -> int:
        """The first block that a token at `position`, or any after it, sees."""
        return max(0, position + 1 - self.window) // PAGE_TOKENS if self.window else 0


@dataclass(frozen=True, slots=True)
class HeadRange:
    """KV heads that a rank holds."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Page groups of a rank's pool, all with pages of one shape, and where each layer lies. With
    several ranks a page is one in each of their pools, with as many heads."""

    groups: tuple[PageGroup, ...]
    layers: tuple[tuple[int, int], ...]  # of each layer: its group, and its index in a page
    ranks: tuple[HeadRange, ...]

    @property
    def page(self) -> PageGroup:
        """The shape that all pages have."""
        return self.groups[0]

    @property
    def digest(self) -> str:
        """Layout digest: says which readers can copy whole pages (pairing only, not in names)."""
        text = repr(("kv-layout", 3, self.groups, self.layers, self.ranks))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def num_sums(self) -> int:
        """Checksums of a page: one a KV head, rank after rank."""
        return sum(rank.count for rank in self.ranks)

    @property
    def page_bytes(self) -> int:
        """Of a page in all ranks."""
        return len(self.ranks) * self.page.page_bytes

    def layers_of(self, group: int) -> list[int]:
        """By their index in a page."""
        return [layer for layer, (owner, _) in enumerate(self.layers) if owner == group]


def layout_of(
    windows: Sequence[int],
    num_heads: int,
    head_dim: int,
    dtype: str,
    *,
    num_ranks: int = 1,
    group_size: int = 0,
) -> KVLayout:
    """`windows`: of each layer, 0 means that it sees all. `group_size`: layers that share a page;
    0: as many as waste little. Raises ConfigError for heads that ranks cannot share."""
    ranks = head_ranges(num_heads, num_ranks)
    kinds = sorted(set(windows))  # full attention first
    size = group_size or _group_size([windows.count(kind) for kind in kinds])
    groups: list[PageGroup] = []
    layers: dict[int, tuple[int, int]] = {}
    for kind in kinds:
        members = [layer for layer, window in enumerate(windows) if window == kind]
        for i, layer in enumerate(members):
            layers[layer] = len(groups) + i // size, i % size
        name = "window" if kind else "full"
        group = PageGroup(name, size, ranks[0].count, head_dim, dtype, window=kind)
        groups += [group] * -(-len(members) // size)
    return KVLayout(tuple(groups), tuple(layers[layer] for layer in range(len(windows))), ranks)


def head_ranges(num_heads: int, num_ranks: int) -> tuple[HeadRange, ...]:
    """Heads by rank: dealt out evenly, or repeated where there are more ranks than heads.

    Raises ConfigError when neither comes out even."""
    fewer, more = sorted((num_heads, num_ranks))
    is_even = fewer > 0 and more % fewer == 0
    ConfigError.check("num_ranks", num_ranks, is_even, f"does not divide {num_heads} KV heads")
    if num_ranks <= num_heads:
        count = num_heads // num_ranks
        return tuple(HeadRange(rank * count, count) for rank in range(num_ranks))
    repeats = num_ranks // num_heads
    return tuple(HeadRange(rank // repeats, 1) for rank in range(num_ranks))


def _group_size(counts: Sequence[int]) -> int:
    """The largest for which padding stays small and no kind is mostly padding."""
    for size in range(min(counts), 1, -1):
        num_padded = sum(-count % size for count in counts)
        if num_padded <= MAX_PADDING * (num_padded + sum(counts)):
            return size
    return 1
