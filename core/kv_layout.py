"""What a page of KV looks like. Everything above the kernels sees pages and cell ranges only.

A page holds PAGE_TOKENS tokens of all layers of its group in one contiguous run:

    page[layer][plane (k | v)][head][token][dim]
        └─ run = one (layer, plane): heads × cell_bytes ─┘

A cell is the contiguous range of one (layer, plane, head): token-major, so the first t tokens of
a cell are its first t / PAGE_TOKENS bytes. Checksums are one 64-bit sum per (page, head).
"""

import hashlib
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.keys import HASH_BLOCK_TOKENS

PAGE_TOKENS = HASH_BLOCK_TOKENS  # a page is what one name stands for
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
WORD_BYTES = 8  # what checksums are made of


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers whose KV shares a page and a rule for what a prefix hit needs."""

    name: str  # "full"; later "window", "latent", "state", "draft"
    num_layers: int
    num_heads: int  # KV heads of this rank
    head_dim: int
    dtype: str = "float32"  # one of ELEMENT_BYTES
    num_planes: int = 2  # K and V

    def __post_init__(self) -> None:
        if self.head_dim * self.element_bytes % WORD_BYTES:
            reason = f"a token of a {self.dtype} cell must fill words of {WORD_BYTES} bytes"
            raise ConfigError("head_dim", self.head_dim, reason)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def cell_bytes(self) -> int:
        return PAGE_TOKENS * self.head_dim * self.element_bytes

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
        return (self.num_layers, self.num_planes, self.num_heads, PAGE_TOKENS, self.head_dim)

    def tail_bytes(self, num_tokens: int) -> int:
        """Bytes at the start of each cell that hold its first `num_tokens` tokens."""
        return num_tokens * self.head_dim * self.element_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Page groups of a rank's pool, in order."""

    groups: tuple[PageGroup, ...]

    @property
    def digest(self) -> str:
        """Layout digest: says which readers can copy whole pages (pairing only, not in names)."""
        return hashlib.sha256(repr(("kv-layout", 1, self.groups)).encode()).hexdigest()
