"""Attention of prefill chunks over a paged pool: causal, over cached context and the chunk itself.

A program takes a tile of queries with all query heads that share a KV head, so each key is read
once for them. Tiles that see most are launched first. Keys that every query of a tile sees need
no mask; with a window all are masked, and only those that the tile reaches are read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.kernels.gpu.launch import num_processors, power_of_two

LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows are (query, head) pairs."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _attend(
    b_q,
    b_o,
    top,
    total,
    p_cells,
    p_table,
    begin,
    end,
    context_len,
    o_position,
    window,
    scale,
    softcap,
    page_stride,
    plane_stride,
    DIM: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Goes on with keys begin … end - 1."""
    o_d = tl.arange(0, BLOCK_D)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        o_n = n + tl.arange(0, BLOCK_N)
        m_n = o_n < context_len
        if MASKED:
            page = tl.load(p_table + o_n // PAGE, mask=m_n, other=0).to(tl.int64)
            m_kv = m_n[:, None] & (o_d < DIM)[None, :]
        else:
            page = tl.load(p_table + o_n // PAGE).to(tl.int64)
            m_kv = (o_d < DIM)[None, :]
        p_kv = p_cells + (page * page_stride + o_n % PAGE * DIM)[:, None] + o_d[None, :]
        b_k = tl.load(p_kv, mask=m_kv, other=0.0)
        b_v = tl.load(p_kv + plane_stride, mask=m_kv, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        if CAPPED:
            b_s = softcap * LOG2_E * (1 - 2 / (tl.exp(2 * b_s * scale / softcap) + 1))
        else:
            b_s = b_s * (scale * LOG2_E)
        if MASKED:
            seen = (o_n[None, :] <= o_position[:, None]) & m_n[None, :]
            seen = seen & ((window == 0) | (o_n[None, :] > o_position[:, None] - window))
            b_s = tl.where(seen, b_s, float("-inf"))
        above = tl.maximum(top, tl.max(b_s, axis=1))
        # A row that has seen nothing yet has no maximum: -inf - -inf would be NaN.
        base = tl.where(above == float("-inf"), 0.0, above) if MASKED else above
        b_p = tl.exp2(b_s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(b_p, axis=1)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * shrink[:, None], input_precision="ieee")
        top = above
    return b_o, top, total


@triton.jit
def _chunk_kernel(
    query,
    pool,
    out,
    block_table,
    context_lens,
    query_start,
    window,
    scale,
    softcap,
    query_stride,
    table_stride,
    page_stride,
    layer_offset,
    plane_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    i_b = (tl.program_id(0) // NUM_KV_HEADS).to(tl.int64)
    i_h = tl.program_id(0) % NUM_KV_HEADS
    first_row = tl.load(query_start + i_b)
    query_len = (tl.load(query_start + i_b + 1) - first_row).to(tl.int32)
    i_q = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    if i_q < query_len:
        context_len = tl.load(context_lens + i_b).to(tl.int32)
        o_m = tl.arange(0, BLOCK_M)
        o_d = tl.arange(0, BLOCK_D)
        o_q = i_q + o_m // GROUP
        m_q = (o_m < QUERIES * GROUP) & (o_q < query_len)
        m_x = m_q[:, None] & (o_d < DIM)[None, :]
        o_head = i_h * GROUP + o_m % GROUP
        o_row = first_row + o_q
        p_query = query + o_row[:, None] * query_stride + o_head[:, None] * DIM + o_d[None, :]
        b_q = tl.load(p_query, mask=m_x, other=0.0)
        past = context_len - query_len
        o_position = past + tl.minimum(o_q, query_len - 1)
        end = past + tl.minimum(i_q + QUERIES, query_len)
        begin = tl.where(window > 0, tl.maximum(past + i_q + 1 - window, 0), 0)
        # Keys up to the first query's own are seen by all.
        plain = tl.where(window > 0, begin, (past + i_q + 1) // BLOCK_N * BLOCK_N)
        p_cells = pool + layer_offset + i_h * (PAGE * DIM)
        p_table = block_table + i_b * table_stride
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        b_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        b_o, top, total = _attend(
            *(b_q, b_o, top, total, p_cells, p_table, begin, plain, context_len, o_position),
            *(window, scale, softcap, page_stride, plane_stride),
            *(DIM, CAPPED, False, PAGE, BLOCK_D, BLOCK_N, STAGES),
        )
        b_o, top, total = _attend(
            *(b_q, b_o, top, total, p_cells, p_table, plain, end, context_len, o_position),
            *(window, scale, softcap, page_stride, plane_stride),
            *(DIM, CAPPED, True, PAGE, BLOCK_D, BLOCK_N, STAGES),
        )
        b_o = b_o / total[:, None]
        p_out = out + (o_row[:, None] * (NUM_KV_HEADS * GROUP) + o_head[:, None]) * DIM
        tl.store(p_out + o_d[None, :], b_o.to(out.dtype.element_ty), mask=m_x)


def tiling(head_dim: int, element_size: int, group: int, work: float) -> Tiling:
    """`work`: rows for each multiprocessor. As measured on an H200, see docs/performance.md."""
    least = power_of_two(group)
    if element_size == 4:
        return Tiling(max(32, least), 32, 4, 2)
    if head_dim > 128:
        return Tiling(max(64, least), 32, 4, 2)
    if work >= 1024 or least > 128:
        return Tiling(max(256, least), 64, 8, 3)
    return Tiling(max(128 if work >= 384 else 64, least), 64, 4, 3)


def attend_chunks(
    query: torch.Tensor,
    out: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    max_query_len: int,
    window: int,
    scale: float,
    softcap: float,
    tiles: Tiling | None = None,
) -> None:
    """Sequence b has rows query_start[b] … query_start[b + 1] - 1 of query and out [T, heads, dim],
    the last of its context_lens[b] tokens. Heads are dense."""
    num_heads, dim = query.shape[1:]
    num_kv_heads = pool.shape[3]
    group = num_heads // num_kv_heads
    work = len(query) * num_heads / num_processors(query.device)
    t = tiles or tiling(dim, pool.element_size(), group, work)
    grid = (len(context_lens) * num_kv_heads, triton.cdiv(max_query_len, t.rows // group))
    _chunk_kernel[grid](
        *(query, pool, out, block_table, context_lens, query_start, window, scale, softcap),
        *(query.stride(0), block_table.stride(0)),
        *(pool.stride(0), layer * pool.stride(1), pool.stride(2)),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        DIM=dim,
        CAPPED=softcap > 0,
        PAGE=PAGE_TOKENS,
        BLOCK_M=t.rows,
        BLOCK_D=power_of_two(dim),
        BLOCK_N=t.keys,
        STAGES=t.stages,
        num_warps=t.warps,
    )
