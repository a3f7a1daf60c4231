"""The inputs of kernels/decode_inputs.py in one launch, a program a row.

Of a block table only what the context reaches is copied."""

import torch
import triton
import triton.language as tl

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.kernels.decode_inputs import DecodeInputs, DecodeRows
from paceline.kernels.gpu.launch import overlap, wait_for_previous

_BLOCK = 256
_SIZES = ["num", "num_rows", "num_groups", "scratch_page", "row_stride", "group_stride", "width"]


@triton.jit(do_not_specialize=_SIZES)
def _fill_kernel(
    token_ids,
    positions,
    context_lens,
    slots,
    out_tables,
    rows,
    contexts,
    tokens,
    drawn,
    tables,
    num,
    num_rows,
    num_groups,
    scratch_page,
    row_stride,
    group_stride,
    width,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    is_used = i < num
    # No launch before writes these three: they come from the host.
    row = tl.load(rows + i, mask=is_used, other=0)
    context = tl.load(contexts + i, mask=is_used, other=1)
    token = tl.load(tokens + i, mask=is_used, other=0)
    wait_for_previous(OVERLAP)
    token = tl.load(drawn + (-1 - token), mask=token < 0, other=token)
    last = context - 1
    tl.store(token_ids + i, token)
    tl.store(positions + i, last)
    tl.store(context_lens + i, context)
    for g in range(num_groups):
        p_in = tables + row * row_stride + g * group_stride
        p_out = out_tables + (g * num_rows + i) * width
        page = tl.load(p_in + last // PAGE, mask=is_used, other=scratch_page)
        tl.store(slots + g * num_rows + i, page * PAGE + last % PAGE)
        for first in range(0, last // PAGE + 1, BLOCK):
            o_b = first + tl.arange(0, BLOCK)
            m_b = o_b <= last // PAGE
            b_page = tl.load(p_in + o_b, mask=m_b & is_used, other=scratch_page)
            tl.store(p_out + o_b, b_page, mask=m_b)


def fill_inputs(inputs: DecodeInputs, decodes: DecodeRows, scratch_page: int) -> None:
    num_groups, num_rows, width = inputs.tables.shape
    _fill_kernel[(num_rows,)](
        *(inputs.token_ids, inputs.positions, inputs.context_lens, inputs.slots, inputs.tables),
        *(decodes.rows, decodes.contexts, decodes.tokens, decodes.drawn, decodes.tables),
        *(len(decodes.rows), num_rows, num_groups, scratch_page),
        *(decodes.tables.stride(0), decodes.tables.stride(1), width),
        PAGE=PAGE_TOKENS,
        BLOCK=_BLOCK,
        **overlap(inputs.tables.device),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num"])
def _write_kernel(tables, places, pages, num, BLOCK: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < num
    b_place = tl.load(places + o_x, mask=m_x, other=0)
    tl.store(tables + b_place, tl.load(pages + o_x, mask=m_x, other=0), mask=m_x)


def write_tables(tables: torch.Tensor, places: torch.Tensor, pages: torch.Tensor) -> None:
    """Flat `tables` [places[i]] = pages[i]; both may be pinned memory of the host."""
    num = len(places)
    _write_kernel[(triton.cdiv(num, _BLOCK),)](
        tables, places, pages, num, BLOCK=_BLOCK, num_warps=4
    )
