"""Gathers scattered pages into others and sums what it moved, in one pass over the bytes.

The definitions are `copy_pages_torch` and kernels/checksum.py. A part is some runs of a page for a
few heads. Where each has a program of its own, programs soon end and what else computes on the
device gets its turn; where programs are few, they take part after part and leave the rest of the
device alone.
"""

import torch
import triton
import triton.language as tl

from paceline.core.kv_layout import WORD_BYTES, PageGroup
from paceline.kernels.checksum import KEYS_PER_RUN, NUM_KEYS, used_bytes
from paceline.kernels.gpu.checksum import add_products, key_pairs
from paceline.kernels.gpu.launch import power_of_two

_RUNS = 8  # of a program
_BLOCK_H, _BLOCK_W, _WARPS = 4, 256, 4


@triton.jit(do_not_specialize=["num_pages", "num_words"])
def _copy_kernel(
    to,
    source,
    ids,
    keys,
    sums,
    num_pages,
    num_words,
    num_runs,
    num_heads,
    cell_words,
    to_stride,
    source_stride,
    NUM_PAIRS: tl.constexpr,
    PAIRS_PER_RUN: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MASKED: tl.constexpr,
):
    parts_of_runs = tl.cdiv(num_runs, RUNS)
    num_parts = num_pages * parts_of_runs * tl.cdiv(num_heads, BLOCK_H)
    for i_part in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        i_page = (i_part % num_pages).to(tl.int64)
        i_cells = i_part // num_pages
        first_run = i_cells % parts_of_runs * RUNS
        o_h = i_cells // parts_of_runs * BLOCK_H + tl.arange(0, BLOCK_H)
        m_h = o_h < num_heads
        p_to = to + tl.load(ids + i_page) * to_stride
        p_source = source + tl.load(ids + num_pages + i_page) * source_stride
        b_sum = tl.zeros([BLOCK_H, BLOCK_W], tl.uint64)
        for run in range(first_run, tl.minimum(first_run + RUNS, num_runs)):
            o_cell = (run * num_heads + o_h) * cell_words
            for w in range(0, num_words, BLOCK_W):
                o_w = w + tl.arange(0, BLOCK_W)
                o_x = o_cell[:, None] + o_w[None, :]
                b_key = tl.load(keys + (o_w + run * PAIRS_PER_RUN) % NUM_PAIRS)[None, :]
                if MASKED:
                    m_x = m_h[:, None] & (o_w < num_words)[None, :]
                    b_x = tl.load(p_source + o_x, mask=m_x, other=0)
                    tl.store(p_to + o_x, b_x, mask=m_x)
                    b_sum = tl.where(m_x, add_products(b_sum, b_x, b_key), b_sum)
                else:
                    b_x = tl.load(p_source + o_x)
                    tl.store(p_to + o_x, b_x)
                    b_sum = add_products(b_sum, b_x, b_key)
        b_total = tl.sum(b_sum, axis=1).to(tl.int64)
        tl.atomic_add(sums + i_page * num_heads + o_h, b_total, mask=m_h, sem="relaxed")


def copy_pages(
    destination: torch.Tensor,
    source: torch.Tensor,
    ids: torch.Tensor,
    sums: torch.Tensor,
    group: PageGroup,
    num_tokens: int | None = None,
    max_programs: int | None = None,
) -> None:
    """As copy_pages_torch. Pages are below 2 GiB. `max_programs`: None for one a part."""
    num_pages = len(sums)
    sums.zero_()
    if not num_pages:
        return
    num_words = used_bytes(group, num_tokens) // WORD_BYTES
    block_h = min(_BLOCK_H, power_of_two(group.num_heads, 1))
    parts_of_page = triton.cdiv(group.num_runs, _RUNS) * triton.cdiv(group.num_heads, block_h)
    num_parts = num_pages * parts_of_page
    _copy_kernel[(min(num_parts, max_programs or num_parts),)](
        *(destination, source, ids, key_pairs(destination.device), sums),
        *(num_pages, num_words, group.num_runs, group.num_heads),
        *(group.cell_bytes // WORD_BYTES, destination.stride(0), source.stride(0)),
        NUM_PAIRS=NUM_KEYS // 2,
        PAIRS_PER_RUN=KEYS_PER_RUN // 2,
        RUNS=_RUNS,
        BLOCK_H=block_h,
        BLOCK_W=_BLOCK_W,
        MASKED=num_words % _BLOCK_W != 0 or group.num_heads % block_h != 0,
        num_warps=_WARPS,
    )
