"""Attention of decode sequences, one query each, over a paged pool, split over the context.

    plan      once a step: cuts each sequence's context into at most MAX_SPLITS items
    attend    each (item, KV head): the softmax of its scores times its values, and log2 of its sum
    merge     weighs the items of a sequence that has several

The grid does not depend on contexts: programs share the items out among themselves, the longest
first, so a captured step serves any contexts. The group of query heads that share a KV head is one
matrix product.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.kernels.gpu import hopper_attention
from paceline.kernels.gpu.launch import (
    num_processors,
    overlap,
    power_of_two,
    prefetch_rows,
    wait_for_previous,
)

MAX_SPLITS = 32  # of a sequence
# Fewest tokens of an item by (sequence, KV head) pairs: few pairs need many items to fill a card,
# and an item costs a start and a part to merge. µs on an H200 for 1060 tokens each, 8 heads: one
# sequence takes 7, 9, 10 with 32, 64, 128; 8 take 17, 25, 37 and 32 take 45, 48, 44 with 128, 512,
# 1024.
_MIN_SPLITS = ((256, 1024), (17, 128), (0, 32))
# (sequence, KV head) pairs for which kernels/gpu/hopper_decode.py is faster. TB/s on an H200, there
# and here: 16 × 1044 2.74, 2.30; 32 × 1044 3.55, 3.15; 32 × 8192 4.18, 3.93; 64 × 1044 3.88, 3.89;
# with more, whole steps take longer: it needs more power.
_HOPPER_PAIRS = range(128, 512)
_FEW_SEQUENCES = 8  # leave memory idle, for what the next launch calls into the cache
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Tiling:
    keys: int
    warps: int
    stages: int
    programs: int  # a multiprocessor
    max_registers: int | None = None  # of a thread


@dataclass(frozen=True, slots=True)
class DecodeItems:
    """Of the layers of one window."""

    window: int  # 0: none
    starts: torch.Tensor  # [D + 1] int32: the first item of each sequence
    items: torch.Tensor  # int32: sequence · MAX_SPLITS + split
    order: torch.Tensor  # [4, items] int32, long items first: sequence, first token, the one behind
    # the last, twice the item and whether it is the sequence's only one
    queue: torch.Tensor  # [2] int32: zeros between launches; places taken, programs that ended
    min_split: int
    is_split: bool  # whether any sequence may have several items


@triton.jit
def _split_len(num_tokens, MIN_SPLIT: tl.constexpr, MAX: tl.constexpr):
    """Tokens of an item where `num_tokens` are seen: all, or more than MIN_SPLIT, to twice that."""
    count = tl.minimum(tl.maximum((num_tokens - 1) // MIN_SPLIT, 1), MAX)
    return (num_tokens + count * 64 - 1) // (count * 64) * 64


@triton.jit(do_not_specialize=["num_sequences", "num_places"])
def _plan_kernel(
    context_lens,
    starts,
    items,
    order,
    queue,
    num_sequences,
    num_places,
    window,
    MIN_SPLIT: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    i_b = tl.program_id(0)
    o_b = tl.arange(0, BLOCK_B)
    contexts = tl.load(context_lens + o_b, mask=o_b < num_sequences, other=1).to(tl.int32)
    lens = tl.where(window > 0, tl.minimum(contexts, window), contexts)
    size = _split_len(lens, MIN_SPLIT, MAX)
    counts = (lens + size - 1) // size
    start = tl.sum(tl.where(o_b < i_b, counts, 0), axis=0)
    count = tl.sum(tl.where(o_b == i_b, counts, 0), axis=0)
    tl.store(starts + i_b, start)
    tl.store(starts + num_sequences, start + count, mask=i_b == num_sequences - 1)
    o_s = tl.arange(0, MAX)
    tl.store(items + start + o_s, i_b * MAX + o_s, mask=o_s < count)
    own_size = tl.sum(tl.where(o_b == i_b, size, 0), axis=0)
    m_before = (size > own_size) | ((size == own_size) & (o_b < i_b))
    place = tl.sum(tl.where(m_before & (o_b < num_sequences), counts, 0), axis=0)
    context_len = tl.sum(tl.where(o_b == i_b, contexts, 0), axis=0)
    begin = context_len - tl.sum(tl.where(o_b == i_b, lens, 0), axis=0) + o_s * own_size
    p_order = order + place + o_s
    tl.store(p_order, tl.zeros([MAX], tl.int32) + i_b, mask=o_s < count)
    tl.store(p_order + num_places, begin, mask=o_s < count)
    end = tl.minimum(begin + own_size, context_len)
    tl.store(p_order + 2 * num_places, end, mask=o_s < count)
    tl.store(p_order + 3 * num_places, 2 * (start + o_s) + (count == 1), mask=o_s < count)
    tl.store(queue + tl.arange(0, 2), tl.zeros([2], tl.int32), mask=i_b == 0)


@triton.jit
def _take(order, place, num_places):
    """Sequence, first token, the one behind the last, and the fourth row of `order`."""
    p_order = order + place
    i_b = tl.load(p_order).to(tl.int64)
    begin, end = tl.load(p_order + num_places), tl.load(p_order + 2 * num_places)
    return i_b, begin, end, tl.load(p_order + 3 * num_places)


@triton.jit
def _first_chunks(
    p_cells,
    block_table,
    i_b,
    table_stride,
    begin,
    end,
    page_stride,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Where 64 chunks of the keys of an item's first tile begin."""
    PER_PAGE: tl.constexpr = 64 * PAGE // BLOCK_N
    o_c = tl.arange(0, 64)
    o_p = tl.minimum(begin // PAGE + o_c // PER_PAGE, (end - 1) // PAGE)
    page = tl.load(block_table + i_b * table_stride + o_p).to(tl.int64)
    return p_cells + page * page_stride + o_c % PER_PAGE * (PAGE * DIM // PER_PAGE)


@triton.jit
def _prefetch(p_chunks, plane_stride, DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    BYTES: tl.constexpr = BLOCK_N * DIM // 64 * p_chunks.dtype.element_ty.primitive_bitwidth // 8
    prefetch_rows(p_chunks, BYTES)
    prefetch_rows(p_chunks + plane_stride, BYTES)


@triton.jit
def _weighted_sum(
    b_q,
    p_cells,
    p_table,
    begin,
    end,
    scale,
    softcap,
    page_stride,
    plane_stride,
    DIM: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Values weighed over an item, the highest score and the sum of weights."""
    o_d = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    b_o = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        o_n = n + tl.arange(0, BLOCK_N)
        m_n = o_n < end
        page = tl.load(p_table + o_n // PAGE, mask=m_n, other=0)
        rows = page.to(tl.int64) * page_stride + o_n % PAGE * DIM
        p_kv = p_cells + rows[:, None] + o_d[None, :]
        m_kv = m_n[:, None] & (o_d < DIM)[None, :]
        b_k = tl.load(p_kv, mask=m_kv, other=0.0)
        b_v = tl.load(p_kv + plane_stride, mask=m_kv, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if CAPPED:
            b_s = softcap * (1 - 2 / (tl.exp(2 * b_s / softcap) + 1))
        b_s = tl.where(m_n[None, :], b_s * LOG2_E, float("-inf"))
        above = tl.maximum(top, tl.max(b_s, axis=1))
        b_p, shrink = tl.exp2(b_s - above[:, None]), tl.exp2(top - above)
        total = total * shrink + tl.sum(b_p, axis=1)
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * shrink[:, None], input_precision="ieee")
        top = above
    return b_o, top, total


@triton.jit
def _store(
    out,
    parts,
    sums,
    b_o,
    top,
    total,
    i_b,
    i_h,
    packed,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What an item brings: to `out` if it is the sequence's only one, else to be merged."""
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g, m_o = o_g < GROUP, (o_g < GROUP)[:, None] & (o_d < DIM)[None, :]
    b_o = b_o / total[:, None]
    is_whole, o_row = packed % 2 == 1, i_h * GROUP + o_g
    p_out = out + (i_b * NUM_KV_HEADS * GROUP + o_row[:, None]) * DIM + o_d[None, :]
    tl.store(p_out, b_o.to(out.dtype.element_ty), mask=m_o & is_whole)
    o_part = (packed // 2 * (NUM_KV_HEADS * GROUP) + o_row).to(tl.int64)
    tl.store(parts + o_part[:, None] * DIM + o_d[None, :], b_o, mask=m_o & (is_whole == 0))
    tl.store(sums + o_part, top + tl.log2(total), mask=m_g & (is_whole == 0))


@triton.jit(do_not_specialize=["num_sequences", "num_places"])
def _attend_kernel(
    query,
    pool,
    out,
    parts,
    sums,
    block_table,
    starts,
    order,
    queue,
    num_sequences,
    num_places,
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
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    num_pairs = tl.load(starts + num_sequences) * NUM_KV_HEADS
    is_shared = num_pairs > tl.num_programs(0)
    i = tl.program_id(0)
    i_b, begin, end, packed = _take(order, tl.minimum(i, num_pairs - 1) // NUM_KV_HEADS, num_places)
    if OVERLAP:
        # The first tile is called into the cache while the new tokens' keys and values are still
        # written: what says where the others lie was written before any product of this layer.
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        if i < num_pairs:
            p_first = _first_chunks(
                *(pool + layer_offset + i % NUM_KV_HEADS * (PAGE * DIM), block_table),
                *(i_b, table_stride, begin, end, page_stride, DIM, PAGE, BLOCK_N),
            )
            _prefetch(p_first, plane_stride, DIM, BLOCK_N)
        tl.extra.cuda.gdc_wait()
    o_g, o_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    m_g = (o_g < GROUP)[:, None] & (o_d < DIM)[None, :]
    while i < num_pairs:
        i_h = i % NUM_KV_HEADS
        p_query = query + i_b * query_stride + (i_h * GROUP + o_g[:, None]) * DIM + o_d[None, :]
        b_q = tl.load(p_query, mask=m_g, other=0.0)
        p_cells = pool + layer_offset + i_h * (PAGE * DIM)
        i = num_pairs
        if is_shared:
            i = tl.num_programs(0) + tl.atomic_add(queue, 1, sem="relaxed")
        next_place = tl.minimum(i, num_pairs - 1) // NUM_KV_HEADS
        next_b, next_begin, next_end, next_packed = _take(order, next_place, num_places)
        p_next = _first_chunks(
            *(pool + layer_offset + i % NUM_KV_HEADS * (PAGE * DIM), block_table),
            *(next_b, table_stride, next_begin, next_end, page_stride, DIM, PAGE, BLOCK_N),
        )
        b_o, top, total = _weighted_sum(
            *(b_q, p_cells, block_table + i_b * table_stride, begin, end, scale, softcap),
            *(page_stride, plane_stride, DIM, CAPPED, PAGE, BLOCK_G, BLOCK_D, BLOCK_N, STAGES),
        )
        if OVERLAP and i < num_pairs:
            _prefetch(p_next, plane_stride, DIM, BLOCK_N)
        _store(
            *(out, parts, sums, b_o, top, total, i_b, i_h, packed),
            *(NUM_KV_HEADS, GROUP, DIM, BLOCK_G, BLOCK_D),
        )
        i_b, begin, end, packed = next_b, next_begin, next_end, next_packed
    num_ended = tl.atomic_add(queue + 1, 1, mask=is_shared)
    if is_shared & (num_ended == tl.num_programs(0) - 1):
        tl.store(queue, 0)
        tl.store(queue + 1, 0)
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _merge_kernel(
    parts,
    sums,
    starts,
    out,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(starts + i_b).to(tl.int64)
    count = tl.load(starts + i_b + 1) - start
    if count > 1:
        o_s = tl.arange(0, MAX)
        o_d = tl.arange(0, BLOCK_D)
        o_part = (start + o_s) * NUM_HEADS + i_h
        b_sum = tl.load(sums + o_part, mask=o_s < count, other=float("-inf"))
        b_w = tl.exp2(b_sum - tl.max(b_sum, axis=0))
        m_part = (o_s < count)[:, None] & (o_d < DIM)[None, :]
        b_part = tl.load(parts + o_part[:, None] * DIM + o_d[None, :], mask=m_part, other=0.0)
        b_o = tl.sum(b_part * b_w[:, None], axis=0) / tl.sum(b_w, axis=0)
        p_out = out + (i_b * NUM_HEADS + i_h) * DIM + o_d
        tl.store(p_out, b_o.to(out.dtype.element_ty), mask=o_d < DIM)


def plan_items(
    context_lens: torch.Tensor, max_context_len: int, num_kv_heads: int, window: int
) -> DecodeItems:
    """`context_lens` [D] of the decode sequences; `max_context_len` bounds them."""
    num_sequences = len(context_lens)
    num_pairs = num_sequences * num_kv_heads
    min_split = next(size for least, size in _MIN_SPLITS if num_pairs >= least)
    longest = min(max_context_len, window) if window else max_context_len
    most = max(1, min(MAX_SPLITS, (longest - 1) // min_split))
    num_places = num_sequences * most
    starts, items, order, queue = (
        torch.empty(size, dtype=torch.int32, device=context_lens.device)
        for size in (num_sequences + 1, num_places, (4, num_places), 2)
    )
    _plan_kernel[(num_sequences,)](
        *(context_lens, starts, items, order, queue, num_sequences, num_places, window),
        MIN_SPLIT=min_split,
        MAX=MAX_SPLITS,
        BLOCK_B=power_of_two(num_sequences),
    )
    return DecodeItems(window, starts, items, order, queue, min_split, most > 1)


def tiling(head_dim: int, element_size: int, num_pairs: int) -> Tiling:
    """As measured on an H200 for 128 numbers of 2 bytes: docs/performance.md."""
    if power_of_two(head_dim) * element_size > 256:
        return Tiling(32, 4, 2, 4)
    # A program a (sequence, KV head) pair, and few of them: each must have much under way.
    return Tiling(128, 4, 2, 4) if 256 <= num_pairs < 512 else Tiling(64, 2, 2, 8)


def attend_decodes(
    query: torch.Tensor,
    out: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    plan: DecodeItems,
    scale: float,
    softcap: float,
    tiles: Tiling | None = None,
) -> None:
    """query, out [D, query heads, dim], their heads dense; pool [pages, layers, planes, KV heads,
    tokens, dim], whose pages are dense."""
    num_sequences, num_heads, dim = query.shape
    num_kv_heads = pool.shape[3]
    num_items = len(plan.items) if plan.is_split else 1
    parts = torch.empty((num_items, num_heads, dim), dtype=torch.float32, device=query.device)
    sums = torch.empty((num_items, num_heads), dtype=torch.float32, device=query.device)
    block_d = power_of_two(dim)
    if tiles is None and _fits_hopper(query, pool, plan, softcap):
        from paceline.kernels.gpu.hopper_decode import attend_items

        arrays = (block_table, context_lens, plan.starts, plan.items)
        ends = (plan.min_split, MAX_SPLITS, scale)
        attend_items(query, out, parts, sums, pool, layer, *arrays, *ends)
        _merge(parts, sums, plan, out)
        return
    t = tiles or tiling(dim, pool.element_size(), num_sequences * num_kv_heads)
    programs = min(len(plan.items) * num_kv_heads, t.programs * num_processors(query.device))
    _attend_kernel[(programs,)](
        *(query, pool, out, parts, sums, block_table, plan.starts, plan.order, plan.queue),
        *(num_sequences, len(plan.items), scale, softcap),
        *(query.stride(0), block_table.stride(0)),
        *(pool.stride(0), layer * pool.stride(1), pool.stride(2)),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        DIM=dim,
        CAPPED=softcap > 0,
        PAGE=PAGE_TOKENS,
        BLOCK_G=power_of_two(num_heads // num_kv_heads),
        BLOCK_D=block_d,
        BLOCK_N=t.keys,
        STAGES=t.stages,
        EARLY=num_sequences <= _FEW_SEQUENCES,
        **overlap(query.device),
        num_warps=t.warps,
        maxnreg=t.max_registers,
    )
    _merge(parts, sums, plan, out)


def _fits_hopper(
    query: torch.Tensor, pool: torch.Tensor, plan: DecodeItems, softcap: float
) -> bool:
    num_pairs = len(query) * pool.shape[3]
    return num_pairs in _HOPPER_PAIRS and hopper_attention.fits(query, pool, plan.window, softcap)


def _merge(parts: torch.Tensor, sums: torch.Tensor, plan: DecodeItems, out: torch.Tensor) -> None:
    if plan.is_split:
        num_sequences, num_heads, dim = out.shape
        _merge_kernel[(num_sequences, num_heads)](
            *(parts, sums, plan.starts, out),
            NUM_HEADS=num_heads,
            DIM=dim,
            MAX=MAX_SPLITS,
            BLOCK_D=power_of_two(dim),
            **overlap(out.device),
            num_warps=2,
        )
