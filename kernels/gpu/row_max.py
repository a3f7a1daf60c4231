"""The highest number of each row and its place, in two launches: of parts of rows, of the parts.

A number and its place are one int64, whose order is that of the numbers, NaN above all, and among
equals the opposite of that of the places.
"""

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import overlap, wait_for_previous

_BLOCK, _WARPS = 4096, 8  # numbers of a part
_MAX_PARTS = 256  # at most, so that a program of the second launch takes them at once


@triton.jit
def _part_kernel(
    x, best, stride, size, BLOCK: tl.constexpr, STEPS: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    b_top = tl.full([BLOCK], -0x8000000000000000, tl.int64)
    for i in tl.static_range(STEPS):
        o_x = (tl.program_id(1) * STEPS + i) * BLOCK + tl.arange(0, BLOCK)
        m_x = o_x < size
        b_x = tl.load(x + row * stride + o_x, mask=m_x, other=0.0) + 0.0  # -0 becomes 0
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_key = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)
        b_key = tl.where(b_x == b_x, b_key, 0x7FFFFFFF)
        b_packed = b_key.to(tl.int64) * 0x100000000 + (0x7FFFFFFF - o_x)
        b_top = tl.maximum(b_top, tl.where(m_x, b_packed, -0x8000000000000000))
    tl.store(best + row * tl.num_programs(1) + tl.program_id(1), tl.max(b_top, axis=0))


@triton.jit
def _row_kernel(
    x, best, values, places, stride, num_parts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BLOCK)
    b_best = tl.load(best + row * num_parts + o_p, mask=o_p < num_parts, other=-0x8000000000000000)
    place = 0x7FFFFFFF - (tl.max(b_best, axis=0) & 0x7FFFFFFF)
    tl.store(places + row, place)
    tl.store(values + row, tl.load(x + row * stride + place))


def row_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, size] float32, dense rows, some numbers → values [rows], places [rows] int64"""
    num_rows, size = x.shape
    steps = triton.cdiv(size, _BLOCK * _MAX_PARTS)
    num_parts = triton.cdiv(size, _BLOCK * steps)
    best = torch.empty((num_rows, num_parts), dtype=torch.int64, device=x.device)
    values = torch.empty(num_rows, dtype=x.dtype, device=x.device)
    places = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    _part_kernel[(num_rows, num_parts)](
        *(x, best, x.stride(0), size),
        BLOCK=_BLOCK,
        STEPS=steps,
        **overlap(x.device),
        num_warps=_WARPS,
    )
    _row_kernel[(num_rows,)](
        *(x, best, values, places, x.stride(0), num_parts),
        BLOCK=_MAX_PARTS,
        **overlap(x.device),
        num_warps=2,
    )
    return values, places
