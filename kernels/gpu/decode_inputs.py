"""The inputs of kernels/decode_inputs.py in one launch, a program a row.

Of a block table only what the context reaches is copied."""

import triton
import triton.language as tl

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.kernels.decode_inputs import DecodeInputs, DecodeRows

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
):
    i = tl.program_id(0).to(tl.int64)
    is_used = i < num
    row = tl.load(rows + i, mask=is_used, other=0)
    context = tl.load(contexts + i, mask=is_used, other=1)
    token = tl.load(tokens + i, mask=is_used, other=0)
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
        num_warps=4,
    )
