"""The sums of kernels/checksum.py, which defines them, on the device that holds the pool.

A program sums some runs of a page for a few heads; sums are added up as integers, so their order
does not matter.
"""

import functools

import numpy as np
import torch
import triton
import triton.language as tl

from paceline.core.kv_layout import WORD_BYTES, PageGroup
from paceline.kernels.checksum import KEYS_PER_RUN, NUM_KEYS, key_table, used_bytes
from paceline.kernels.gpu.launch import power_of_two

_RUNS = 8  # of a program
_BLOCK_H, _BLOCK_W = 4, 512


@triton.jit
def add_products(b_sum, b_x, b_key):
    """To uint64 sums: of each word of `b_x` and its two keys, the product of the keyed halves."""
    b_low = b_x.to(tl.uint32) + b_key.to(tl.uint32)
    b_high = (b_x >> 32).to(tl.uint32) + (b_key >> 32).to(tl.uint32)
    return b_sum + b_low.to(tl.uint64) * b_high.to(tl.uint64)


@triton.jit
def _checksum_kernel(
    words,
    pages,
    keys,
    sums,
    num_runs,
    num_heads,
    num_words,
    cell_words,
    page_words,
    NUM_PAIRS: tl.constexpr,
    PAIRS_PER_RUN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i_page = tl.program_id(0).to(tl.int64)
    first_run = tl.program_id(1) * RUNS
    o_h = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    m_h = o_h < num_heads
    p_page = words + tl.load(pages + i_page) * page_words
    b_sum = tl.zeros([BLOCK_H, BLOCK_W], tl.uint64)
    for run in range(first_run, tl.minimum(first_run + RUNS, num_runs)):
        p_cells = p_page + (run * num_heads + o_h.to(tl.int64)) * cell_words
        for w in range(0, num_words, BLOCK_W):
            o_w = w + tl.arange(0, BLOCK_W)
            m_w = m_h[:, None] & (o_w < num_words)[None, :]
            b_x = tl.load(p_cells[:, None] + o_w[None, :], mask=m_w, other=0)
            b_key = tl.load(keys + (o_w + run * PAIRS_PER_RUN) % NUM_PAIRS)[None, :]
            b_sum = tl.where(m_w, add_products(b_sum, b_x, b_key), b_sum)
    b_total = tl.sum(b_sum, axis=1).to(tl.int64)
    tl.atomic_add(sums + i_page * num_heads + o_h, b_total, mask=m_h, sem="relaxed")


@functools.cache
def key_pairs(device: torch.device) -> torch.Tensor:
    """[NUM_KEYS / 2] int64: two keys each, the first in the low half."""
    return torch.from_numpy(key_table().view(np.int64).copy()).to(device)


def sum_pages(
    pool: torch.Tensor, pages: torch.Tensor, group: PageGroup, num_tokens: int | None = None
) -> torch.Tensor:
    """As sum_pages_torch: int64 [pages, heads], the bits of the unsigned sums."""
    num_bytes = used_bytes(group, num_tokens)
    sums = torch.zeros((len(pages), group.num_heads), dtype=torch.int64, device=pool.device)
    if not len(pages):
        return sums
    words = pool.view(torch.int64)
    block_h = min(_BLOCK_H, power_of_two(group.num_heads, 1))
    runs, heads = triton.cdiv(group.num_runs, _RUNS), triton.cdiv(group.num_heads, block_h)
    _checksum_kernel[(len(pages), runs, heads)](
        *(words, pages, key_pairs(pool.device), sums),
        *(group.num_runs, group.num_heads, num_bytes // WORD_BYTES),
        *(group.cell_bytes // WORD_BYTES, words.stride(0)),
        NUM_PAIRS=NUM_KEYS // 2,
        PAIRS_PER_RUN=KEYS_PER_RUN // 2,
        RUNS=_RUNS,
        BLOCK_H=block_h,
        BLOCK_W=_BLOCK_W,
        num_warps=4,
    )
    return sums
