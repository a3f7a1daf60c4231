"""Copies pages of KV from one pool to another and sums what it copied, in one pass.

Compiled code where it was built (one loop: load, sum, store; the GIL is released), else numpy;
on a CUDA device Triton's kernel, else torch. The sums are those of kernels/checksum.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.kv_layout import WORD_BYTES, PageGroup
from paceline.kernels.checksum import (
    sum_pages_reference,
    sum_pages_torch,
    used_bytes,
    whole_pages,
)

if TYPE_CHECKING:  # a process that only copies pages never loads torch
    import torch

_native: ModuleType | None
try:
    from paceline.kernels import _native
except ImportError:  # a source tree without a compiler still works, slower
    _native = None


def copy_pages(
    destination: memoryview,
    source: memoryview,
    destination_pages: NDArray[np.int64],
    source_pages: NDArray[np.int64],
    group: PageGroup,
    num_tokens: int | None = None,
) -> NDArray[np.uint64]:
    """Copies source_pages[i] into destination_pages[i]; returns the sums [pages, heads].

    `num_tokens`: copies and sums only the first tokens of each cell, the rest of the destination
    stays as it was. The sums are of what was read, which is what lies in the destination.
    Raises IndexError for a page outside its pool, before anything is written.
    """
    num_bytes = used_bytes(group, num_tokens)
    if _native is None:
        return _copy_with_numpy(
            destination, source, destination_pages, source_pages, group, num_tokens
        )
    to, source_ids = _page_ids(destination_pages), _page_ids(source_pages)
    sums = np.empty((len(source_ids), group.num_heads), dtype=np.uint64)
    _native.copy_pages(destination, source, to, source_ids, *_sizes(group, num_bytes), sums)
    return sums


def sum_pages(
    memory: memoryview,
    pages: NDArray[np.int64],
    group: PageGroup,
    num_tokens: int | None = None,
) -> NDArray[np.uint64]:
    """Sums [pages, heads] of pages of a pool. Raises IndexError for a page outside it."""
    num_bytes = used_bytes(group, num_tokens)
    if _native is None:
        _check_pages("pages", pages, memory, group)
        return sum_pages_reference(memory, pages, group, num_tokens)
    ids = _page_ids(pages)
    sums = np.empty((len(ids), group.num_heads), dtype=np.uint64)
    _native.sum_pages(memory, ids, *_sizes(group, num_bytes), sums)
    return sums


def copy_pages_on_device(
    destination: torch.Tensor,
    source: torch.Tensor,
    ids: torch.Tensor,
    sums: torch.Tensor,
    group: PageGroup,
    num_tokens: int | None = None,
    max_programs: int | None = None,
) -> None:
    """As copy_pages_torch, by the fastest code for the device, on its current stream.

    `max_programs` that Triton's kernel may have at work; None: as many as the device takes."""
    from paceline.kernels import backend

    if not backend.uses_triton(destination):
        copy_pages_torch(destination, source, ids, sums, group, num_tokens)
        return
    from paceline.kernels.gpu import pages

    pages.copy_pages(destination, source, ids, sums, group, num_tokens, max_programs)


def copy_pages_torch(
    destination: torch.Tensor,
    source: torch.Tensor,
    ids: torch.Tensor,
    sums: torch.Tensor,
    group: PageGroup,
    num_tokens: int | None = None,
) -> None:
    """Copies between pools on one device and sums what arrived, as `copy_pages` does.

    Pools are int64 words [pages, page_bytes / 8]. `ids`: destination pages, then as many source
    pages; int64, of pages that exist: nothing checks them. `sums`: int64 [pages, heads], filled
    with the bits of the unsigned sums.
    """
    num_words = used_bytes(group, num_tokens) // WORD_BYTES
    to_pages, source_pages = ids.view(2, -1)
    cells = (-1, group.page_bytes // group.cell_bytes, group.cell_bytes // WORD_BYTES)
    used = source.view(cells)[source_pages, :, :num_words]
    destination.view(cells)[to_pages, :, :num_words] = used
    pool = destination.view(-1, group.num_layers, group.num_planes, group.num_heads, *cells[2:])
    sums.copy_(sum_pages_torch(pool.unsqueeze(-1), to_pages, group, num_tokens))


def _copy_with_numpy(
    destination: memoryview,
    source: memoryview,
    destination_pages: NDArray[np.int64],
    source_pages: NDArray[np.int64],
    group: PageGroup,
    num_tokens: int | None,
) -> NDArray[np.uint64]:
    _check_pages("destination_pages", destination_pages, destination, group)
    _check_pages("source_pages", source_pages, source, group)
    num_bytes = used_bytes(group, num_tokens)
    to, cells = (
        whole_pages(memory, group).reshape(
            -1, group.page_bytes // group.cell_bytes, group.cell_bytes
        )
        for memory in (destination, source)
    )
    to[destination_pages, :, :num_bytes] = cells[source_pages, :, :num_bytes]
    return sum_pages_reference(destination, destination_pages, group, num_tokens)


def _page_ids(pages: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.ascontiguousarray(pages, dtype=np.int64)


def _sizes(group: PageGroup, num_bytes: int) -> tuple[int, int, int, int, int]:
    return (group.page_bytes, group.num_runs, group.num_heads, group.cell_bytes, num_bytes)


def _check_pages(name: str, pages: NDArray[np.int64], memory: memoryview, group: PageGroup) -> None:
    num_pages = memory.nbytes // group.page_bytes
    outside = (pages < 0) | (pages >= num_pages)
    if outside.any():
        i = int(outside.argmax())
        raise IndexError(f"{name}[{i}]={pages[i]}: the pool has {num_pages} pages")
