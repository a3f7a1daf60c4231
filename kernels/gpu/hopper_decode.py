"""Attention of many decode sequences on Hopper: kernels/gpu/decode_attention.py with a warp that
fetches pages.

Items are those of its plan. A program takes one after the other; its ring of tiles is filled
across their borders, and, before the launches ahead have ended, with tokens that they do not
write. Query heads that share a KV head are the first rows of a product of 64.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.kernels.gpu.hopper_attention import DIM, pool_rows
from paceline.kernels.gpu.launch import num_processors

_ROWS = gl.constexpr(64)
_HALF = gl.constexpr(64)  # numbers of a head that lie side by side in shared memory: 128 bytes
LOG2_E = gl.constexpr(1.4426950408889634)
_PAGES_PER_TILE, _STAGES, _PROGRAMS, _MAX_REGISTERS = 4, 3, 2, 128


@gluon.jit
def _span(items, context_lens, i_item, MIN_SPLIT: gl.constexpr, MAX: gl.constexpr):
    """Sequence of an item, its first token and the one behind its last, and the context's length.
    As in kernels/gpu/decode_attention.py."""
    packed = gl.load(items + i_item)
    i_b = packed // MAX
    context_len = gl.load(context_lens + i_b).to(gl.int32)
    count = gl.minimum(gl.maximum((context_len - 1) // MIN_SPLIT, 1), MAX)
    size = (context_len + count * 64 - 1) // (count * 64) * 64
    begin = packed % MAX * size
    return i_b, begin, gl.minimum(begin + size, context_len), context_len


@gluon.jit
def _produce(
    desc,
    items,
    context_lens,
    block_table,
    num_items,
    table_stride,
    page_rows,
    layer_row,
    plane_rows,
    ring,
    full,
    empty,
    NUM_KV_HEADS: gl.constexpr,
    MIN_SPLIT: gl.constexpr,
    MAX: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
):
    KEYS: gl.constexpr = PAGES * 16
    t = 0
    for i in range(gl.program_id(0), num_items * NUM_KV_HEADS, gl.num_programs(0)):
        i_item = i // NUM_KV_HEADS
        i_b, begin, end, context_len = _span(items, context_lens, i_item, MIN_SPLIT, MAX)
        p_table = block_table + i_b.to(gl.int64) * table_stride
        last_block = (end - 1) // 16
        key_row = layer_row + i % NUM_KV_HEADS * 16
        for n in range(begin, end, KEYS):
            rows = ()
            for p in gl.static_range(PAGES):
                page = gl.load(p_table + gl.minimum(n // 16 + p, last_block))
                rows = rows + ((page * page_rows).to(gl.int32) + key_row,)  # type: ignore[assignment]
            stage = t % STAGES
            mbarrier.wait(empty.index(stage), ((t // STAGES) & 1) ^ 1)
            if n + KEYS >= context_len:
                gdc_wait()  # the new token is written by the launch before
            barrier = full.index(stage)
            mbarrier.expect(barrier, 4 * PAGES * desc.block_type.nbytes)
            for p in gl.static_range(PAGES):
                for half in gl.static_range(2):
                    tile = (stage * 4 + half) * PAGES + p
                    tma.async_copy_global_to_shared(
                        desc, [rows[p], half * _HALF], barrier, ring.index(tile)
                    )
                    tma.async_copy_global_to_shared(
                        desc,
                        [rows[p] + plane_rows, half * _HALF],
                        barrier,
                        ring.index(tile + 2 * PAGES),
                    )
            t += 1


@gluon.jit
def _clear(tile, num_kept, KEYS: gl.constexpr):
    """Rows behind the context may hold anything: 0 · NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    b_v = tile.load(layout)
    o_n = gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout))
    tile.store(gl.where((o_n < num_kept)[:, None], b_v, 0.0).to(b_v.dtype))


@gluon.jit
def _weighted_sum(
    queries,
    tiles,
    full,
    empty,
    t,
    begin,
    end,
    context_len,
    scale,
    LAYOUT: gl.constexpr,
    OUT_LAYOUT: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Low and high halves of values, weighed over an item, the highest score and the sum of
    weights, and the tile behind its last."""
    p_layout: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    top = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    b_low = gl.zeros([_ROWS, _HALF], gl.float32, OUT_LAYOUT)
    b_high = gl.zeros([_ROWS, _HALF], gl.float32, OUT_LAYOUT)
    for n in range(begin, end, KEYS):
        stage = t % STAGES
        mbarrier.wait(full.index(stage), (t // STAGES) & 1)
        b_s = gl.zeros([_ROWS, KEYS], gl.float32, LAYOUT)
        keys = tiles.index(stage * 4).permute((1, 0))
        b_s = warpgroup_mma(queries.index(0), keys, b_s, use_acc=False, is_async=True)
        keys = tiles.index(stage * 4 + 1).permute((1, 0))
        b_s = warpgroup_mma(queries.index(1), keys, b_s, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        if n + KEYS > end:
            o_n = n + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
            b_s = gl.where((o_n < end)[None, :], b_s, float("-inf"))
            if n + KEYS > context_len:
                _clear(tiles.index(stage * 4 + 2), context_len - n, KEYS)
                _clear(tiles.index(stage * 4 + 3), context_len - n, KEYS)
                fence_async_shared()
        above = gl.maximum(top, gl.max(b_s, axis=1))
        b_p = gl.exp2(b_s * scale - (above * scale)[:, None])
        shrink = gl.exp2((top - above) * scale)
        total = total * shrink + gl.sum(b_p, axis=1)
        top = above
        b_p = gl.convert_layout(b_p.to(queries.dtype), p_layout)
        b_shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        values = tiles.index(stage * 4 + 2)
        b_low = warpgroup_mma(b_p, values, b_low * b_shrink, is_async=True)
        values = tiles.index(stage * 4 + 3)
        b_high = warpgroup_mma(b_p, values, b_high * b_shrink, is_async=True)
        b_low, b_high = warpgroup_mma_wait(0, deps=(b_low, b_high))
        mbarrier.arrive(empty.index(stage))
        t += 1
    return b_low, b_high, top * scale, total, t


@gluon.jit
def _consume(
    query,
    out,
    parts,
    sums,
    items,
    starts,
    context_lens,
    num_items,
    query_stride,
    scale,
    queries,
    tiles,
    full,
    empty,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    MIN_SPLIT: gl.constexpr,
    MAX: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
):
    KEYS: gl.constexpr = PAGES * 16
    NUM_HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    o_g = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, out_layout))
    o_c = gl.arange(0, _HALF, layout=gl.SliceLayout(0, out_layout))
    gdc_wait()
    t = 0
    for i in range(gl.program_id(0), num_items * NUM_KV_HEADS, gl.num_programs(0)):
        i_item = i // NUM_KV_HEADS
        i_b, begin, end, context_len = _span(items, context_lens, i_item, MIN_SPLIT, MAX)
        head = i % NUM_KV_HEADS * GROUP
        _take(query + i_b.to(gl.int64) * query_stride + head * 128, queries, GROUP)
        b_low, b_high, top, total, t = _weighted_sum(
            *(queries, tiles, full, empty, t, begin, end, context_len, scale),
            *(layout, out_layout, KEYS, STAGES),
        )
        inverse = gl.convert_layout(1 / total, gl.SliceLayout(1, out_layout))[:, None]
        b_low = b_low * inverse
        b_high = b_high * inverse
        m_row = (o_g < GROUP)[:, None]
        if gl.load(starts + i_b + 1) - gl.load(starts + i_b) == 1:
            o_row = (i_b * NUM_HEADS + head).to(gl.int64) + o_g
            p_out = out + o_row[:, None] * 128 + o_c[None, :]
            gl.store(p_out, b_low.to(query.dtype.element_ty), mask=m_row)
            gl.store(p_out + _HALF, b_high.to(query.dtype.element_ty), mask=m_row)
        else:
            o_part = (i_item * NUM_HEADS + head).to(gl.int64) + o_g
            p_part = parts + o_part[:, None] * 128 + o_c[None, :]
            gl.store(p_part, b_low, mask=m_row)
            gl.store(p_part + _HALF, b_high, mask=m_row)
            b_sum = gl.convert_layout(top + gl.log2(total), gl.SliceLayout(1, out_layout))
            gl.store(sums + o_part, b_sum, mask=o_g < GROUP)
    gdc_launch_dependents()


@gluon.jit
def _take(p_query, queries, GROUP: gl.constexpr):
    """The queries of an item into shared memory; the other rows are zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_m = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, layout))
    o_d = gl.arange(0, _HALF, layout=gl.SliceLayout(0, layout))
    p_rows = p_query + o_m[:, None] * 128 + o_d[None, :]
    low = gl.load(p_rows, mask=(o_m < GROUP)[:, None], other=0.0)
    high = gl.load(p_rows + _HALF, mask=(o_m < GROUP)[:, None], other=0.0)
    queries.index(0).store(low)
    queries.index(1).store(high)
    fence_async_shared()


@gluon.jit(do_not_specialize=["num_sequences"])
def _attend_kernel(
    desc,
    query,
    out,
    parts,
    sums,
    items,
    starts,
    context_lens,
    block_table,
    num_sequences,
    scale,
    query_stride,
    table_stride,
    page_rows,
    layer_row,
    plane_rows,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    MIN_SPLIT: gl.constexpr,
    MAX: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = query.dtype.element_ty
    num_items = gl.load(starts + num_sequences)
    queries = gl.allocate_shared_memory(dtype, [2, _ROWS, _HALF], desc.layout)
    # Of a stage: keys and values, low and high half each.
    tiles = gl.allocate_shared_memory(dtype, [4 * STAGES, PAGES * 16, _HALF], desc.layout)
    ring = tiles._reinterpret(dtype, [4 * STAGES * PAGES, 16, _HALF], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (query, out, parts, sums, items, starts, context_lens, num_items,
                        query_stride, scale, queries, tiles, full, empty, NUM_KV_HEADS, GROUP,
                        MIN_SPLIT, MAX, PAGES, STAGES)),
            (_produce, (desc, items, context_lens, block_table, num_items, table_stride,
                        page_rows, layer_row, plane_rows, ring, full, empty, NUM_KV_HEADS,
                        MIN_SPLIT, MAX, PAGES, STAGES)),
        ],
        [1],
        [40],
    )
    # fmt: on


def attend_items(
    query: torch.Tensor,
    out: torch.Tensor,
    parts: torch.Tensor,
    sums: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    starts: torch.Tensor,
    items: torch.Tensor,
    min_split: int,
    max_splits: int,
    scale: float,
) -> None:
    """Of the items of kernels/gpu/decode_attention.py, without a window and a soft cap."""
    num_sequences, num_heads, _ = query.shape
    num_kv_heads = pool.shape[3]
    programs = min(len(items) * num_kv_heads, _PROGRAMS * num_processors(query.device))
    _attend_kernel[(programs,)](
        pool_rows(pool),
        *(query, out, parts, sums, items, starts, context_lens, block_table),
        *(num_sequences, scale * LOG2_E.value, query.stride(0), block_table.stride(0)),
        *(pool.stride(0) // DIM, layer * pool.stride(1) // DIM, pool.stride(2) // DIM),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        MIN_SPLIT=min_split,
        MAX=max_splits,
        PAGES=_PAGES_PER_TILE,
        STAGES=_STAGES,
        num_warps=4,
        maxnreg=_MAX_REGISTERS,
        launch_pdl=True,
    )
