"""Draws of kernels/gumbel_max.py in two launches: roughly of all numbers, exactly of the best.

The best score of a row is above -4, and near it rough scores differ from those in float64 by less
than 1e-4. So the first launch keeps the best rough score of each part of a row, and the second
judges those that come within MARGIN of the row's best in float64.
"""

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import overlap, wait_for_previous
from paceline.kernels.gumbel_max import GOLDEN, SCRAMBLE_FACTORS
from paceline.kernels.token_filter import MIN_TEMPERATURE

_BLOCK, _WARPS, _EXACT_WARPS = 1024, 2, 4  # numbers of a part
_MAX_PARTS = 256  # at most, so that a program of the second launch takes them at once
_MARGIN = tl.constexpr(1e-3)
_LN_2 = tl.constexpr(0.6931471805599453)
_GOLDEN = tl.constexpr(GOLDEN)
_FIRST_FACTOR = tl.constexpr(SCRAMBLE_FACTORS[0])
_SECOND_FACTOR = tl.constexpr(SCRAMBLE_FACTORS[1])
_LEAST_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)


@triton.jit
def _top_half(key, o_x):
    """uint32, of which the noise of each token is made."""
    b_h = key + o_x.to(tl.int64) * _GOLDEN
    b_h = (b_h ^ ((b_h >> 30) & 0x3FFFFFFFF)) * _FIRST_FACTOR
    b_h = (b_h ^ ((b_h >> 27) & 0x1FFFFFFFFF)) * _SECOND_FACTOR
    return ((b_h >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _log2(b_x, FAST: tl.constexpr):
    """FAST: of the special function unit, with errors of 2^-22, a fifth of the instructions."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [b_x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(b_x)


@triton.jit
def _rough_gumbel(b_top, FAST: tl.constexpr):
    """-ln(-ln(1 - v)), v = (top + ½) / 2^32. Where v is small, -ln(1 - v) is its series."""
    b_v = (b_top.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_rest = ((b_top ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_series = b_v * (1 / 2 + b_v * (1 / 3 + b_v * (1 / 4 + b_v * (1 / 5 + b_v * (1 / 6)))))
    b_exponential = -_LN_2 * _log2(b_rest, FAST)
    b_exponential = tl.where(b_v < 0.125, b_v + b_v * b_series, b_exponential)
    return -_LN_2 * _log2(b_exponential, FAST)


@triton.jit
def _rough_scores(b_x, m_kept, b_top, best, inverse, FAST: tl.constexpr):
    """`inverse`: of the temperature."""
    b_scores = _rough_gumbel(b_top, FAST) + (b_x - best) * inverse
    return tl.where(m_kept, b_scores, -float("inf"))


@triton.jit
def _rough_kernel(
    x,
    bests,
    temperatures,
    lows,
    highs,
    keys,
    parts,
    stride,
    size,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    FAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    best, low, high = tl.load(bests + row), tl.load(lows + row), tl.load(highs + row)
    temperature = tl.maximum(tl.load(temperatures + row), _LEAST_TEMPERATURE)
    key = tl.load(keys + row)
    b_best = tl.full([BLOCK], -float("inf"), tl.float32)
    for i in tl.static_range(STEPS):
        o_x = (tl.program_id(1) * STEPS + i) * BLOCK + tl.arange(0, BLOCK)
        b_x = tl.load(x + row * stride + o_x, mask=o_x < size, other=float("nan"))
        m_kept = (b_x >= low) & (b_x <= high)
        if tl.max(m_kept.to(tl.int32), axis=0) > 0:
            b_top = _top_half(key, o_x)
            b_scores = _rough_scores(b_x, m_kept, b_top, best, 1 / temperature, FAST)
            b_best = tl.maximum(b_best, b_scores)
    tl.store(parts + row * tl.num_programs(1) + tl.program_id(1), tl.max(b_best, axis=0))


@triton.jit
def _exact_kernel(
    x,
    bests,
    temperatures,
    lows,
    highs,
    keys,
    parts,
    places,
    stride,
    size,
    num_parts,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    FAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    best, low, high = tl.load(bests + row), tl.load(lows + row), tl.load(highs + row)
    temperature = tl.maximum(tl.load(temperatures + row), _LEAST_TEMPERATURE)
    key = tl.load(keys + row)
    o_p = tl.arange(0, MAX_PARTS)
    p_parts = parts + row * num_parts
    b_parts = tl.load(p_parts + o_p, mask=o_p < num_parts, other=-float("inf"))
    bound = tl.max(b_parts, axis=0) - _MARGIN
    top_score = tl.full([], -float("inf"), tl.float64)
    top_place = size - 1
    for part in range(num_parts):
        if tl.load(p_parts + part) >= bound:
            for i in range(STEPS):
                o_x = (part * STEPS + i) * BLOCK + tl.arange(0, BLOCK)
                b_x = tl.load(x + row * stride + o_x, mask=o_x < size, other=float("nan"))
                m_kept = (b_x >= low) & (b_x <= high)
                b_top = _top_half(key, o_x)
                m_near = _rough_scores(b_x, m_kept, b_top, best, 1 / temperature, FAST) >= bound
                # 1 - v has 33 digits: exact
                b_rest = ((b_top ^ 0xFFFFFFFF).to(tl.float64) + 0.5) * 2.3283064365386963e-10
                b_scaled = (b_x.to(tl.float64) - best.to(tl.float64)) / temperature.to(tl.float64)
                b_exact = b_scaled - tl.log(-tl.log(b_rest))
                b_exact = tl.where(m_near & m_kept, b_exact, -float("inf"))
                score = tl.max(b_exact, axis=0)
                place = tl.min(tl.where(b_exact == score, o_x, size), axis=0)
                top_place = tl.where(score > top_score, place, top_place)
                top_score = tl.maximum(top_score, score)
    tl.store(places + row, top_place.to(tl.int64))


def gumbel_max(
    x: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Of kernels/gumbel_max.py; x [R, size] has dense rows and some numbers."""
    num_rows, size = x.shape
    steps = triton.cdiv(size, _BLOCK * _MAX_PARTS)
    num_parts = triton.cdiv(size, _BLOCK * steps)
    columns = (best, temperature, low, high, keys)
    parts = torch.empty((num_rows, num_parts), dtype=torch.float32, device=x.device)
    places = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    _rough_kernel[(num_rows, num_parts)](
        *(x, *columns, parts, x.stride(0), size),
        BLOCK=_BLOCK,
        STEPS=steps,
        FAST=x.is_cuda,
        **overlap(x.device),
        num_warps=_WARPS,
    )
    _exact_kernel[(num_rows,)](
        *(x, *columns, parts, places, x.stride(0), size, num_parts),
        BLOCK=_BLOCK,
        STEPS=steps,
        MAX_PARTS=_MAX_PARTS,
        FAST=x.is_cuda,
        **overlap(x.device),
        num_warps=_EXACT_WARPS,
    )
    return places
