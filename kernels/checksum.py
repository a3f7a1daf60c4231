"""Sums that verify KV: one 64-bit integer a (page, KV head). This module is their definition.

Of run r = layer · num_planes + plane and head h, let w_0 … w_m-1 be the cell's 8-byte
little-endian words (of a partial page: those of its first `num_tokens` tokens). With K a fixed
table of 4096 32-bit keys,

    S(r, h)      = Σ_i ((lo32(w_i) + K[2i + 8r]) mod 2^32) · ((hi32(w_i) + K[2i + 1 + 8r]) mod 2^32)
    sum[page, h] = Σ_r S(r, h)                                              (all modulo 2^64)

where indices into K wrap. The position makes swapped tokens visible, the 8r swapped layers and
planes. It is the NH hash (Black, Halevi, Krawczyk, Krovetz, Rogaway 1999) with public keys: it
finds accidents, not forgeries.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.kv_layout import PageGroup

if TYPE_CHECKING:  # a process that only copies pages never loads torch
    import torch

NUM_KEYS = 4096
KEYS_PER_RUN = 8
_KEY_SEED = 0x706163656C696E65
_MASK64 = 2**64 - 1
_TORCH_CHUNK_BYTES = 16 << 20  # of KV at once; int64 temporaries take about six times as much


@functools.cache
def key_table() -> NDArray[np.uint32]:
    """K: the low halves of splitmix64's outputs (Steele, Lea, Flood 2014)."""
    keys, state = [], _KEY_SEED
    for _ in range(NUM_KEYS):
        state = (state + 0x9E3779B97F4A7C15) & _MASK64
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK64
        keys.append((z ^ z >> 31) & 0xFFFFFFFF)
    return np.array(keys, dtype=np.uint32)


def used_bytes(group: PageGroup, num_tokens: int | None) -> int:
    """Bytes of each cell that count: all, or those of the first `num_tokens` tokens."""
    if num_tokens is None:
        return group.cell_bytes
    if not 1 <= num_tokens <= group.page_tokens:
        raise ValueError(f"num_tokens={num_tokens}: a page holds 1 to {group.page_tokens}")
    return group.tail_bytes(num_tokens)


def whole_pages(memory: memoryview, group: PageGroup) -> NDArray[np.uint8]:
    """The bytes of `memory` that are pages: what a segment of a tier has behind them is not."""
    num_bytes = memory.nbytes // group.page_bytes * group.page_bytes
    return np.frombuffer(memory, np.uint8, num_bytes)


def run_keys(group: PageGroup, num_bytes: int) -> NDArray[np.uint32]:
    """Keys of the 4-byte halves of a cell's first `num_bytes`: [runs, halves]."""
    positions = np.arange(num_bytes // 4)[None, :]
    offsets = KEYS_PER_RUN * np.arange(group.num_runs)[:, None]
    keys: NDArray[np.uint32] = key_table()[(positions + offsets) % NUM_KEYS]
    return keys


def sum_pages_reference(
    memory: memoryview, pages: NDArray[np.int64], group: PageGroup, num_tokens: int | None = None
) -> NDArray[np.uint64]:
    """The definition in numpy: sums [pages, heads] of pages of a pool."""
    num_bytes = used_bytes(group, num_tokens)
    cells = whole_pages(memory, group).reshape(
        -1, group.num_runs, group.num_heads, group.cell_bytes
    )
    halves = np.ascontiguousarray(cells[pages][..., :num_bytes]).view("<u4")
    keyed = halves + run_keys(group, num_bytes)[:, None, :]
    products = keyed[..., 0::2].astype(np.uint64) * keyed[..., 1::2]
    sums: NDArray[np.uint64] = products.sum(axis=(1, 3), dtype=np.uint64)
    return sums


def sum_pages_on_device(
    pool: torch.Tensor, pages: torch.Tensor, group: PageGroup, num_tokens: int | None = None
) -> torch.Tensor:
    """As sum_pages_torch, by the fastest code for the pool's device."""
    from paceline.kernels import backend

    if not backend.uses_triton(pool):
        return sum_pages_torch(pool, pages, group, num_tokens)
    from paceline.kernels.gpu import checksum

    return checksum.sum_pages(pool, pages, group, num_tokens)


def sum_pages_torch(
    pool: torch.Tensor, pages: torch.Tensor, group: PageGroup, num_tokens: int | None = None
) -> torch.Tensor:
    """Sums on the pool's own device: int64 [pages, heads], the bits of the unsigned sums.

    `pool` is [pages, layers, planes, heads, page_tokens, dim], `pages` int64 on the same device.
    `.cpu().numpy().view(np.uint64)` gives what the other paths return.
    """
    import torch

    num_bytes = used_bytes(group, num_tokens)
    keys = torch.from_numpy(run_keys(group, num_bytes).astype(np.int64)).to(pool.device)
    chunk = max(1, _TORCH_CHUNK_BYTES // group.page_bytes)
    sums = [_sum_chunk(pool[part], keys, num_bytes) for part in torch.split(pages, chunk)]
    return torch.cat(sums)


def _sum_chunk(values: torch.Tensor, keys: torch.Tensor, num_bytes: int) -> torch.Tensor:
    import torch

    cells = values.flatten(4).flatten(1, 2)  # [pages, runs, heads, tokens · dim]
    used = cells[..., : num_bytes // cells.element_size()].contiguous()
    halves = used.view(torch.int32).to(torch.int64)
    keyed = (halves + keys[:, None, :]) & 0xFFFFFFFF
    return (keyed[..., 0::2] * keyed[..., 1::2]).sum(dim=(1, 3))
