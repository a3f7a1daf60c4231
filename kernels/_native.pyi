"""Compiled kernels of the CPU; they release the GIL while they work. Their callers say more."""

from typing import Any

from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview | NDArray[Any]

# 0 portable, 1 AVX2, 2 AVX-512: what this CPU has, and PACELINE_MAX_ISA (portable, avx2, avx512)
# allows; the default of `level`
BEST_LEVEL: int

def copy_pages(
    destination: Buffer,
    source: Buffer,
    destination_pages: Buffer,  # int64
    source_pages: Buffer,  # int64
    page_bytes: int,
    num_runs: int,
    num_heads: int,
    cell_bytes: int,
    used_bytes: int,  # at the start of each cell
    sums: Buffer,  # uint64 [pages, heads], written
    level: int = ...,
    /,
) -> None:
    """Raises IndexError for a page outside its buffer, ValueError when sizes do not agree."""

def sum_pages(
    memory: Buffer,
    pages: Buffer,  # int64
    page_bytes: int,
    num_runs: int,
    num_heads: int,
    cell_bytes: int,
    used_bytes: int,
    sums: Buffer,  # uint64 [pages, heads], written
    level: int = ...,
    /,
) -> None:
    """Raises IndexError for a page outside the buffer, ValueError when sizes do not agree."""

def product(
    x: Buffer,  # float32 [rows, depth]
    weight: Buffer,  # [ceil(columns / 32), depth, 32], padded with zeros
    bias: Buffer | None,  # [columns]
    out: Buffer,  # [rows, columns], written
    rows: int,
    depth: int,
    columns: int,
    accumulate: bool,  # adds to what `out` holds
    num_threads: int,
    level: int = ...,
    /,
) -> None:
    """out = x @ weight + bias. Raises ValueError when sizes do not agree."""

def quantized_product(
    x: Buffer,  # float32 [rows, depth]
    weight: Buffer,  # uint8 [ceil(columns / 32), ceil(depth / 32), block]: kernels/quantized.py
    bias: Buffer | None,  # [columns]
    out: Buffer,  # [rows, columns], written
    rows: int,
    depth: int,
    columns: int,
    bits: int,  # 4 or 8
    has_zeros: bool,
    accumulate: bool,  # adds to what `out` holds
    num_threads: int,
    level: int = ...,
    /,
) -> None:
    """out = x @ weight + bias. Raises ValueError when sizes do not agree."""

def attend(
    query: Buffer,  # float32, from the first row's first head to the last row's last
    out: Buffer,  # [rows, heads, dim], written
    pool: Buffer,  # [pages, layers, 2, kv_heads, 16, dim]
    query_start: Buffer,  # int64 [B + 1]
    context_lens: Buffer,  # int64 [B]
    block_table: Buffer,  # int64 [B, blocks]
    query_stride: int,  # numbers from one row of `query` to the next
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    num_layers: int,
    layer: int,
    window: int,  # 0: none
    scale: float,
    softcap: float,  # 0: none
    num_threads: int,
    level: int = ...,
    /,
) -> None:
    """Raises IndexError for a page outside the pool, ValueError when sizes do not agree."""

def rms_norm(
    x: Buffer,  # float32 [rows, dim]
    weight: Buffer,  # [dim]
    out: Buffer,  # [rows, dim], written
    dim: int,
    epsilon: float,
    num_threads: int,
    level: int = ...,
    /,
) -> None: ...
def gate(
    gate_up: Buffer,  # float32 [rows, 2, inner]
    out: Buffer,  # [rows, inner], written
    inner: int,
    activation: int,  # 0 silu, 1 gelu with tanh
    num_threads: int,
    level: int = ...,
    /,
) -> None: ...
def rotate(
    heads: Buffer,  # float32, changed in place
    cosines: Buffer,
    sines: Buffer,
    num_rows: int,
    num_heads: int,
    dim: int,
    row_stride: int,  # strides in numbers
    head_stride: int,
    table_stride: int,
    num_threads: int,
    level: int = ...,
    /,
) -> None: ...
def row_max(
    x: Buffer,  # float32 [rows, size]
    best: Buffer,  # [rows], written
    ids: Buffer,  # int64 [rows], written
    size: int,
    num_threads: int,
    level: int = ...,
    /,
) -> None: ...
def filter(
    x: Buffer,  # float32 [rows, size]
    best: Buffer,  # [rows], like all below
    temperature: Buffer,
    min_p: Buffer,  # 0: off
    top_k: Buffer,  # int64; 0: off
    top_p: Buffer,  # 1: off
    typical_p: Buffer,  # 1: off
    low: Buffer,  # written
    high: Buffer,  # written
    size: int,
    num_threads: int,
    level: int = ...,
    /,
) -> None: ...
def gumbel_max(
    x: Buffer,  # float32 [rows, size]
    best: Buffer,  # [rows], like all below
    temperature: Buffer,
    low: Buffer,
    high: Buffer,
    keys: Buffer,  # int64
    ids: Buffer,  # int64, written
    size: int,
    num_threads: int,
    level: int = ...,
    /,
) -> None: ...
def token_scores(
    x: Buffer,  # float32 [rows, size]
    ids: Buffer,  # int64 [rows]
    logprobs: Buffer,  # [rows], written, like all below
    ranks: Buffer,  # int64 [rows]
    top_ids: Buffer,  # int64 [rows, num_top]
    top_logprobs: Buffer,  # [rows, num_top]
    size: int,
    num_top: int,  # at most 128
    num_threads: int,
    level: int = ...,
    /,
) -> None:
    """Raises IndexError for an id outside its row, ValueError when sizes do not agree."""

def write_kv(
    kv: Buffer,  # float32, from the first token's first cell to the last one's last
    pool: Buffer,  # [pages, layers, cells, 16, dim], written
    slots: Buffer,  # int64 [tokens]
    kv_stride: int,  # numbers from one token to the next
    num_cells: int,  # of K and V
    dim: int,
    num_layers: int,
    layer: int,
    num_threads: int,
    /,
) -> None:
    """Raises IndexError for a slot outside the pool, before anything is written."""
