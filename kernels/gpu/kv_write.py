"""Norms and rotates the query and key heads of new tokens and writes K and V into the pool.

One pass over the product qkv [T, query, key and value heads, dim]: queries go to new memory, keys
and values straight into their slots. For a head's numbers x, after its norm if there is one:

    y[i]           = x[i] · cos[i] − x[i + r/2] · sin[i]           i < r/2
    y[i + r/2]     = x[i + r/2] · cos[i] + x[i] · sin[i]           r: how many dimensions rotate
"""

import torch
import triton
import triton.language as tl

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.kernels.gpu.launch import overlap, power_of_two, wait_for_previous
from paceline.kernels.kv_write import HeadScale

_HEADS = ((32, 2), (64, 4), (1 << 62, 16))  # of a program, by the most tokens


@triton.jit
def _sum_parts(p_x, m_x, part_stride, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Rounded as a product that is stored in one piece."""
    b_x = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        b_x += tl.load(p_x + i * part_stride, mask=m_x, other=0.0)
    return b_x.to(DTYPE).to(tl.float32)


@triton.jit
def _scaled(b_x, p_weight, m_x, scale, m_rows):
    """Rows of `m_rows` times scale and weight, rounded as kernels/rmsnorm.py does."""
    b_w = tl.load(p_weight, mask=m_x & m_rows[:, None], other=1.0)
    b_y = ((b_x * scale[:, None]).to(b_w.dtype).to(tl.float32) * b_w.to(tl.float32)).to(b_w.dtype)
    return tl.where(m_rows[:, None], b_y.to(tl.float32), b_x)


@triton.jit
def _write_kernel(
    qkv,
    query,
    pool,
    slots,
    cos,
    sin,
    weight,
    epsilon,
    token_stride,
    table_stride,
    page_stride,
    layer_offset,
    part_stride,
    PARTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    NORM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_d = tl.arange(0, BLOCK_D)
    m_x = (o_h < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (o_d < DIM)[None, :]
    m_qk = o_h < NUM_HEADS + NUM_KV_HEADS
    p_rows = qkv + token * token_stride + o_h[:, None] * DIM
    DTYPE: tl.constexpr = query.dtype.element_ty
    b_x = _sum_parts(p_rows + o_d[None, :], m_x, part_stride, PARTS, DTYPE)
    if NORM:
        scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / DIM + epsilon)
        b_x = _scaled(b_x, weight + o_h[:, None] * DIM + o_d[None, :], m_x, scale, m_qk)
    if ROTATED > 0:
        o_other = tl.where(o_d < ROTATED // 2, o_d + ROTATED // 2, o_d - ROTATED // 2)
        m_d = o_d < ROTATED
        m_other = m_x & m_d[None, :] & m_qk[:, None]
        b_other = _sum_parts(p_rows + o_other[None, :], m_other, part_stride, PARTS, DTYPE)
        if NORM:
            p_weight = weight + o_h[:, None] * DIM + o_other[None, :]
            b_other = _scaled(b_other, p_weight, m_other, scale, m_qk)
        b_cos = tl.load(cos + token * table_stride + o_d, mask=m_d, other=1.0)
        b_sin = tl.load(sin + token * table_stride + o_d, mask=m_d, other=0.0)
        b_y = b_x * b_cos[None, :].to(tl.float32) + b_other * b_sin[None, :].to(tl.float32)
        b_x = tl.where(m_other, b_y, b_x)
    b_y = b_x.to(query.dtype.element_ty)
    p_query = query + (token * NUM_HEADS + o_h[:, None]) * DIM + o_d[None, :]
    tl.store(p_query, b_y, mask=m_x & (o_h < NUM_HEADS)[:, None])
    slot = tl.load(slots + token)
    cell = slot // PAGE * page_stride + layer_offset + slot % PAGE * DIM
    p_cells = pool + cell + (o_h[:, None] - NUM_HEADS) * (PAGE * DIM) + o_d[None, :]
    tl.store(p_cells, b_y, mask=m_x & (o_h >= NUM_HEADS)[:, None])


def write_kv(
    qkv: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None = None,
    norm: HeadScale | None = None,
) -> torch.Tensor:
    """Returns the queries [T, query heads, dim]. Heads of `qkv` are dense, and so are pages.

    `tables`: cos and sin [T, 1, rotated], sin with the sign of its half; None: no rotation.
    """
    return write_kv_parts(qkv[None], pool, layer, slots, tables, norm)


def write_kv_parts(
    parts: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor] | None = None,
    norm: HeadScale | None = None,
) -> torch.Tensor:
    """The same for a qkv that is the sum of parts [splits, T, heads, dim]."""
    num_parts, num_tokens, num_rows, dim = parts.shape
    num_kv_heads = pool.shape[3]
    num_heads = num_rows - 2 * num_kv_heads
    query = torch.empty((num_tokens, num_heads, dim), dtype=pool.dtype, device=pool.device)
    if not num_tokens:
        return query
    cos, sin = tables if tables is not None else (parts, parts)
    block_h = next(heads for most, heads in _HEADS if num_tokens <= most)
    _write_kernel[(num_tokens, triton.cdiv(num_rows, block_h))](
        *(parts, query, pool, slots, cos, sin, norm.weight if norm else parts),
        *(norm.epsilon if norm else 0.0, parts.stride(1), cos.stride(0)),
        *(pool.stride(0), layer * pool.stride(1), parts.stride(0) if num_parts > 1 else 0),
        PARTS=num_parts,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        ROTATED=cos.shape[-1] if tables is not None else 0,
        NORM=norm is not None,
        PAGE=PAGE_TOKENS,
        BLOCK_H=block_h,
        BLOCK_D=power_of_two(dim),
        **overlap(pool.device),
        num_warps=max(1, block_h // 4),
    )
    return query
