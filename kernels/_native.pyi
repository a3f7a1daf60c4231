"""Verified copy of KV pages in C. Releases the GIL while it works; see kernels/pages.py."""

from typing import Any

from numpy.typing import NDArray

Buffer = bytes | bytearray | memoryview | NDArray[Any]

BEST_LEVEL: int  # of this CPU: 0 portable, 1 AVX2, 2 AVX-512; the default of `level`

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
