"""Attention of prefill chunks on Hopper: causal, over cached context and the chunk itself.

An item is a tile of queries with all query heads that share a KV head, so each key is read once
for them; a program takes some, one after the other. One warp fetches pages by the bulk copy engine
into a ring of tiles, across the borders of items; two groups of four warps take half of the rows
each:

    scores of tile i + 1   while it multiplies,
    values of tile i       weighed by exp2 of their scores, are added up

Tiles of keys are taken from the last one down, those of queries that see most first. (The shape of
FlashAttention-3, Shah et al. 2024.)
"""

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.kernels.gpu.launch import num_processors

DIM = 128  # of a head: the only size
ROWS, KEYS = 128, 128  # of a tile; rows are (query, head) pairs
_HALF_ROWS = gl.constexpr(64)  # of a group of warps
_HALF = gl.constexpr(64)  # numbers of a head that lie side by side in shared memory: 128 bytes
_PAGES = gl.constexpr(8)  # of a tile of keys
_STAGES = 2
# Query tokens. Items of longer chunks differ much: each gets a program, as processors come free.
_LONG = 2048
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _item(turn, num_items, query_start, context_lens, NUM_KV_HEADS: gl.constexpr, Q: gl.constexpr):
    """The item of a program in one of its turns. Those that see most come first, and who has the
    longest one in a turn has the shortest in the next.

    Sequence and KV head, the sequence's first row, its new tokens, the first one of the item (at
    or behind the end: there is none), its context and how many tiles of keys are seen."""
    num_pairs = num_items[0] * NUM_KV_HEADS
    back = gl.num_programs(0) - 1 - gl.program_id(0)
    i = turn * gl.num_programs(0) + gl.where(turn % 2 == 0, gl.program_id(0), back)
    i_b = (i % num_pairs // NUM_KV_HEADS).to(gl.int64)
    first_row = gl.load(query_start + i_b)
    query_len = (gl.load(query_start + i_b + 1) - first_row).to(gl.int32)
    context_len = gl.load(context_lens + i_b).to(gl.int32)
    i_q = (num_items[1] - 1 - i // num_pairs) * Q
    end = context_len - query_len + gl.minimum(i_q + Q, query_len)
    num_tiles = (end + _PAGES * 16 - 1) // (_PAGES * 16)
    num_tiles = gl.where((i_q >= 0) & (i_q < query_len), num_tiles, 0)
    return i_b, i % NUM_KV_HEADS, first_row, query_len, i_q, context_len, num_tiles


@gluon.jit
def _fetch(desc, pages, ring, stage, full, empty, t, STAGES: gl.constexpr):
    """One tile of keys or values: rows pages[p] … + 15 of the pool, for each of its pages."""
    mbarrier.wait(empty.index(stage), ((t // STAGES) & 1) ^ 1)
    barrier = full.index(stage)
    mbarrier.expect(barrier, _PAGES * 2 * desc.block_type.nbytes)
    for p in gl.static_range(_PAGES):
        tma.async_copy_global_to_shared(
            desc, [pages[p], 0], barrier, ring.index(stage * 2 * _PAGES + p)
        )
        tma.async_copy_global_to_shared(
            desc, [pages[p], _HALF], barrier, ring.index((stage * 2 + 1) * _PAGES + p)
        )


@gluon.jit
def _produce(
    desc,
    query_start,
    context_lens,
    block_table,
    table_stride,
    num_items,
    page_rows,
    layer_row,
    plane_rows,
    rings,
    barriers,
    NUM_KV_HEADS: gl.constexpr,
    Q: gl.constexpr,
    STAGES: gl.constexpr,
):
    keys_full, keys_empty, values_full, values_empty = barriers
    t = 0
    num_all = num_items[0] * NUM_KV_HEADS * num_items[1]
    for turn in range(gl.cdiv(num_all, gl.num_programs(0))):
        i_b, i_h, first_row, query_len, i_q, context_len, num_tiles = _item(
            turn, num_items, query_start, context_lens, NUM_KV_HEADS, Q
        )
        p_table = block_table + i_b * table_stride
        key_row = layer_row + i_h * 16
        for i in range(num_tiles):
            stage = t % STAGES
            first = (num_tiles - 1 - i) * _PAGES
            keys = ()
            values = ()
            for p in gl.static_range(_PAGES):
                page = gl.load(p_table + gl.minimum(first + p, (context_len - 1) // 16))
                row = (page * page_rows).to(gl.int32) + key_row
                keys = keys + (row,)  # type: ignore[assignment]
                values = values + (row + plane_rows,)  # type: ignore[assignment]
            _fetch(desc, keys, rings[0], stage, keys_full, keys_empty, t, STAGES)
            _fetch(desc, values, rings[1], stage, values_full, values_empty, t, STAGES)
            t += 1


@gluon.jit
def _scores(part: gl.constexpr, queries, key_tiles, stage, LAYOUT: gl.constexpr):
    """Launches the product of queries and a tile of keys."""
    zeros = gl.zeros([_HALF_ROWS, _PAGES * 16], gl.float32, LAYOUT)
    low = key_tiles.index(stage * 2).permute((1, 0))
    high = key_tiles.index(stage * 2 + 1).permute((1, 0))
    b_s = warpgroup_mma(queries.index(part * 2), low, zeros, use_acc=False, is_async=True)
    return warpgroup_mma(queries.index(part * 2 + 1), high, b_s, is_async=True)


@gluon.jit
def _clear(tile, num_kept):
    """Rows behind the context may hold anything: 0 · NaN would be NaN. Each group of warps does
    it, and writes what the other has written."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    b_v = tile.load(layout)
    o_n = gl.arange(0, _PAGES * 16, layout=gl.SliceLayout(1, layout))
    tile.store(gl.where((o_n < num_kept)[:, None], b_v, 0.0).to(b_v.dtype))


@gluon.jit
def _softmax(b_s, top, total, n, o_position, plain_end, scale, LAYOUT: gl.constexpr):
    """→ weights of a tile, and what earlier sums shrink by."""
    if n + _PAGES * 16 > plain_end:
        o_n = n + gl.arange(0, _PAGES * 16, layout=gl.SliceLayout(0, LAYOUT))
        b_s = gl.where(o_n[None, :] <= o_position[:, None], b_s, float("-inf"))
    above = gl.maximum(top, gl.max(b_s, axis=1))
    # A row that has seen nothing yet has no maximum: -inf - -inf would be NaN.
    base = gl.where(above == float("-inf"), 0.0, above * scale)
    b_p = gl.exp2(b_s * scale - base[:, None])
    shrink = gl.exp2(top * scale - base)
    return b_p, above, total * shrink + gl.sum(b_p, axis=1), shrink


@gluon.jit
def _weigh(b_p, value_tiles, stage, b_low, b_high):
    """Launches the product of weights and a tile of values."""
    low = warpgroup_mma(b_p, value_tiles.index(stage * 2), b_low, is_async=True)
    high = warpgroup_mma(b_p, value_tiles.index(stage * 2 + 1), b_high, is_async=True)
    return low, high


@gluon.jit
def _store(b_o, p_out, o_row, o_head, m_row, first, NUM_HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    b_o = gl.convert_layout(b_o.to(p_out.dtype.element_ty), LAYOUT)
    o_d = first + gl.arange(0, _HALF, layout=gl.SliceLayout(0, LAYOUT))
    p_row = p_out + (o_row * NUM_HEADS + o_head)[:, None] * 128
    gl.store(p_row + o_d[None, :], b_o, mask=m_row[:, None])


@gluon.jit
def _weighted_sum(
    part: gl.constexpr,
    queries,
    tiles,
    barriers,
    t,
    num_tiles,
    context_len,
    plain_end,
    o_position,
    scale,
    LAYOUT: gl.constexpr,
    OUT_LAYOUT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Low and high halves of values, weighed over all tiles of an item, and the sum of weights."""
    dtype: gl.constexpr = queries.dtype
    p_layout: gl.constexpr = gl.DotOperandLayout(0, OUT_LAYOUT, 2)
    keys, values = tiles
    keys_full, keys_empty, values_full, values_empty = barriers
    top = gl.full([_HALF_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros([_HALF_ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    b_low = gl.zeros([_HALF_ROWS, _HALF], gl.float32, OUT_LAYOUT)
    b_high = gl.zeros([_HALF_ROWS, _HALF], gl.float32, OUT_LAYOUT)
    n = (num_tiles - 1) * (_PAGES * 16)
    stage = t % STAGES
    phase = (t // STAGES) & 1
    mbarrier.wait(keys_full.index(stage), phase)
    b_s = warpgroup_mma_wait(0, deps=(_scores(part, queries, keys, stage, LAYOUT),))
    mbarrier.arrive(keys_empty.index(stage))
    b_w, top, total, shrink = _softmax(b_s, top, total, n, o_position, plain_end, scale, LAYOUT)
    b_p = gl.convert_layout(b_w.to(dtype), p_layout)
    mbarrier.wait(values_full.index(stage), phase)
    if n + _PAGES * 16 > context_len:
        _clear(values.index(stage * 2), context_len - n)
        _clear(values.index(stage * 2 + 1), context_len - n)
        fence_async_shared()
    for i in range(1, num_tiles):
        n -= _PAGES * 16
        stage = (t + i) % STAGES
        mbarrier.wait(keys_full.index(stage), ((t + i) // STAGES) & 1)
        b_next = _scores(part, queries, keys, stage, LAYOUT)
        before = (t + i - 1) % STAGES
        mbarrier.wait(values_full.index(before), ((t + i - 1) // STAGES) & 1)
        low, high = _weigh(b_p, values, before, b_low, b_high)
        b_s = warpgroup_mma_wait(2, deps=(b_next,))
        mbarrier.arrive(keys_empty.index(stage))
        b_w, top, total, shrink = _softmax(b_s, top, total, n, o_position, plain_end, scale, LAYOUT)
        b_low, b_high = warpgroup_mma_wait(0, deps=(low, high))
        mbarrier.arrive(values_empty.index(before))
        b_p = gl.convert_layout(b_w.to(dtype), p_layout)
        b_shrink = gl.convert_layout(shrink, gl.SliceLayout(1, OUT_LAYOUT))[:, None]
        b_low = b_low * b_shrink
        b_high = b_high * b_shrink
    last = (t + num_tiles - 1) % STAGES
    mbarrier.wait(values_full.index(last), ((t + num_tiles - 1) // STAGES) & 1)
    low, high = _weigh(b_p, values, last, b_low, b_high)
    b_low, b_high = warpgroup_mma_wait(0, deps=(low, high))
    mbarrier.arrive(values_empty.index(last))
    return b_low, b_high, total


@gluon.jit
def _consume(
    part: gl.constexpr,
    query,
    out,
    query_start,
    context_lens,
    query_stride,
    num_items,
    scale,
    queries,
    tiles,
    barriers,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    Q: gl.constexpr,
    STAGES: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _PAGES * 16, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    HEADS: gl.constexpr = NUM_KV_HEADS * GROUP
    o_m = part * _HALF_ROWS + gl.arange(0, _HALF_ROWS, layout=gl.SliceLayout(1, rows))
    o_s = part * _HALF_ROWS + gl.arange(0, _HALF_ROWS, layout=gl.SliceLayout(1, layout))
    t = 0
    num_all = num_items[0] * NUM_KV_HEADS * num_items[1]
    for turn in range(gl.cdiv(num_all, gl.num_programs(0))):
        i_b, i_h, first_row, query_len, i_q, context_len, num_tiles = _item(
            turn, num_items, query_start, context_lens, NUM_KV_HEADS, Q
        )
        if num_tiles > 0:
            o_row = first_row + i_q + o_m // GROUP
            o_head = i_h * GROUP + o_m % GROUP
            m_row = i_q + o_m // GROUP < query_len
            _take(query, queries, part, o_row, o_head, m_row, query_stride, rows)
            past = context_len - query_len
            o_position = past + gl.minimum(i_q + o_s // GROUP, query_len - 1)
            plain_end = past + i_q + 1  # keys before are seen by all rows
            b_low, b_high, total = _weighted_sum(
                *(part, queries, tiles, barriers, t, num_tiles, context_len, plain_end),
                *(o_position, scale, layout, out_layout, STAGES),
            )
            t += num_tiles
            inverse = gl.convert_layout(1 / total, gl.SliceLayout(1, out_layout))[:, None]
            _store(b_low * inverse, out, o_row, o_head, m_row, 0, HEADS, rows)
            _store(b_high * inverse, out, o_row, o_head, m_row, _HALF, HEADS, rows)


@gluon.jit
def _take(query, queries, part, o_row, o_head, m_row, query_stride, LAYOUT: gl.constexpr):
    """Queries into shared memory."""
    o_d = gl.arange(0, _HALF, layout=gl.SliceLayout(0, LAYOUT))
    p_query = query + (o_row * query_stride + o_head * 128)[:, None] + o_d[None, :]
    low = gl.load(p_query, mask=m_row[:, None], other=0.0)
    high = gl.load(p_query + _HALF, mask=m_row[:, None], other=0.0)
    queries.index(part * 2).store(low)
    queries.index(part * 2 + 1).store(high)
    fence_async_shared()


@gluon.jit(do_not_specialize=["num_sequences", "num_query_tiles"])
def _chunk_kernel(
    desc,
    query,
    out,
    block_table,
    context_lens,
    query_start,
    scale,
    num_sequences,
    num_query_tiles,
    query_stride,
    table_stride,
    page_rows,
    layer_row,
    plane_rows,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    Q: gl.constexpr = 2 * _HALF_ROWS // GROUP
    TILE: gl.constexpr = _PAGES * 16
    dtype: gl.constexpr = query.dtype.element_ty
    num_items = (num_sequences, num_query_tiles)
    queries = gl.allocate_shared_memory(dtype, [4, _HALF_ROWS, _HALF], desc.layout)
    keys = gl.allocate_shared_memory(dtype, [2 * STAGES, TILE, _HALF], desc.layout)
    values = gl.allocate_shared_memory(dtype, [2 * STAGES, TILE, _HALF], desc.layout)
    key_ring = keys._reinterpret(dtype, [2 * STAGES * _PAGES, 16, _HALF], desc.layout)
    value_ring = values._reinterpret(dtype, [2 * STAGES * _PAGES, 16, _HALF], desc.layout)
    keys_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(keys_full.index(i), count=1)
        mbarrier.init(keys_empty.index(i), count=2)
        mbarrier.init(values_full.index(i), count=1)
        mbarrier.init(values_empty.index(i), count=2)
    tiles = (keys, values)
    rings = (key_ring, value_ring)
    barriers = (keys_full, keys_empty, values_full, values_empty)
    ZERO: gl.constexpr = 0
    ONE: gl.constexpr = 1
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (ZERO, query, out, query_start, context_lens, query_stride, num_items, scale,
                        queries, tiles, barriers, NUM_KV_HEADS, GROUP, Q, STAGES)),
            (_consume, (ONE, query, out, query_start, context_lens, query_stride, num_items, scale,
                        queries, tiles, barriers, NUM_KV_HEADS, GROUP, Q, STAGES)),
            (_produce, (desc, query_start, context_lens, block_table, table_stride, num_items,
                        page_rows, layer_row, plane_rows, rings, barriers, NUM_KV_HEADS, Q,
                        STAGES)),
        ],
        [4, 1],
        [NUM_REGS, PRODUCER_REGS],
    )
    # fmt: on


def attend_chunks(
    query: torch.Tensor,
    out: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor,
    max_query_len: int,
    scale: float,
) -> None:
    """As that of kernels/gpu/prefill_attention.py, for what `fits`."""
    num_heads, num_kv_heads = query.shape[1], pool.shape[3]
    group = num_heads // num_kv_heads
    num_sequences, num_query_tiles = len(context_lens), triton.cdiv(max_query_len, ROWS // group)
    num_items = num_sequences * num_kv_heads * num_query_tiles
    is_long = max_query_len > _LONG
    programs = num_items if is_long else min(num_items, num_processors(query.device))
    _chunk_kernel[(programs,)](
        pool_rows(pool),
        *(query, out, block_table, context_lens, query_start, scale * LOG2_E.value),
        *(num_sequences, num_query_tiles),
        *(query.stride(0), block_table.stride(0), pool.stride(0) // DIM),
        *(layer * pool.stride(1) // DIM, pool.stride(2) // DIM),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        STAGES=_STAGES,
        NUM_REGS=232,
        PRODUCER_REGS=40,
        num_warps=4,
    )


def pool_rows(pool: torch.Tensor) -> TensorDescriptor:
    """All of a pool as rows of a head's numbers, to be fetched by the page and half."""
    dtype = getattr(gl, str(pool.dtype).removeprefix("torch."))
    layout = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, rank=2)
    num_rows = (len(pool) - 1) * (pool.stride(0) // DIM) + pool[0].numel() // DIM
    rows = torch.as_strided(pool, (num_rows, DIM), (DIM, 1))
    return TensorDescriptor.from_tensor(rows, [PAGE_TOKENS, DIM // 2], layout)


def fits(query: torch.Tensor, pool: torch.Tensor, window: int, softcap: float) -> bool:
    group = query.shape[1] // pool.shape[3]
    is_half = pool.dtype in (torch.bfloat16, torch.float16)
    is_plain = not window and not softcap and query.shape[2] == DIM and group in (1, 2, 4, 8, 16)
    num_rows = len(pool) * (pool.stride(0) // DIM)
    return is_half and is_plain and num_rows < 1 << 31 and is_hopper(query.device)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
