"""Root mean square norm, one program a row; may add the result to a residual.

    y = x / sqrt(mean(x²) + epsilon) · weight    (+ residual)

A row is held in registers. Statistics in float32; rounded to the type of the weight before it is
multiplied, as in torch.
"""

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import overlap, power_of_two, wait_for_previous


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    residual,
    out,
    stride,
    size,
    epsilon,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    o_x = tl.arange(0, BLOCK)
    m_x = o_x < size
    b_x = tl.load(x + row * stride + o_x, mask=m_x, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / size + epsilon)
    b_w = tl.load(weight + o_x, mask=m_x, other=0.0)
    b_y = ((b_x * scale).to(b_w.dtype).to(tl.float32) * b_w.to(tl.float32)).to(b_w.dtype)
    b_y = b_y.to(out.dtype.element_ty)
    if ADD:
        b_r = tl.load(residual + row * size + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_y = (b_y.to(tl.float32) + b_r).to(out.dtype.element_ty)
    tl.store(out + row * size + o_x, b_y, mask=m_x)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, size] with dense rows, weight [size], residual [T, size] dense → new memory."""
    num_rows, size = x.shape
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    block = power_of_two(size)
    add = residual is not None
    _rms_norm_kernel[(num_rows,)](
        *(x, weight, residual if add else x, out, x.stride(0), size, epsilon),
        ADD=add,
        BLOCK=block,
        **overlap(x.device),
        num_warps=min(8, max(1, block // 512)),
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _add_parts_kernel(
    residual,
    parts,
    weight,
    out,
    num_rows,
    size,
    epsilon,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    o_x = tl.arange(0, BLOCK)
    m_x = o_x < size
    b_w = tl.load(weight + o_x, mask=m_x, other=0.0)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    b_x = tl.load(residual + row * size + o_x, mask=m_x, other=0.0).to(tl.float32)
    for i in tl.static_range(PARTS):
        b_x += tl.load(parts + (i * num_rows + row) * size + o_x, mask=m_x, other=0.0)
    b_x = b_x.to(residual.dtype.element_ty)
    tl.store(residual + row * size + o_x, b_x, mask=m_x)
    b_x = b_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x, axis=0) / size + epsilon)
    b_y = ((b_x * scale).to(b_w.dtype).to(tl.float32) * b_w.to(tl.float32)).to(b_w.dtype)
    tl.store(out + row * size + o_x, b_y.to(out.dtype.element_ty), mask=m_x)


def add_parts_rms_norm(
    residual: torch.Tensor, parts: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """residual [T, size] += the sum of parts [splits, T, size]; returns its norm, new memory."""
    num_rows, size = residual.shape
    out = torch.empty_like(residual)
    block = power_of_two(size)
    _add_parts_kernel[(num_rows,)](
        *(residual, parts, weight, out, num_rows, size, epsilon),
        PARTS=len(parts),
        BLOCK=block,
        **overlap(residual.device),
        num_warps=min(8, max(1, block // 512)),
    )
    return out
