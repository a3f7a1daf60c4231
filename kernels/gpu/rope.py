"""Tables of kernels/rope.py in one launch, a program a token."""

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import power_of_two


@triton.jit
def _table_kernel(positions, inv_freq, out, scaling, half, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_i = tl.arange(0, BLOCK)
    m_i = o_i < half
    angle = tl.load(positions + row).to(tl.float32) * tl.load(inv_freq + o_i, mask=m_i, other=0.0)
    b_cos, b_sin = tl.cos(angle) * scaling, tl.sin(angle) * scaling
    p_out = out + row * 4 * half + o_i
    tl.store(p_out, b_cos, mask=m_i)
    tl.store(p_out + half, b_cos, mask=m_i)
    tl.store(p_out + 2 * half, -b_sin, mask=m_i)
    tl.store(p_out + 3 * half, b_sin, mask=m_i)


def rope_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [T], inv_freq [r / 2] float32 → cos, sin [T, 1, r] float32"""
    num_tokens, half = len(positions), len(inv_freq)
    out = torch.empty((num_tokens, 1, 4 * half), dtype=torch.float32, device=positions.device)
    if num_tokens:
        _table_kernel[(num_tokens,)](
            *(positions, inv_freq, out, scaling, half), BLOCK=power_of_two(half), num_warps=1
        )
    return out[..., : 2 * half], out[..., 2 * half :]
