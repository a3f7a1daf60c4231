"""Gated activation: act(gate) · up, in float32, rounded once.

gate_up [T, 2 · inner] → [T, inner]
"""

import torch
import triton
import triton.language as tl

from paceline.kernels.gpu.launch import overlap, wait_for_previous

_BLOCK = 1024


@triton.jit
def _gate_kernel(
    gate_up, out, inner, ACT: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    o_x = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < inner
    p_gate = gate_up + row * 2 * inner + o_x
    b_gate = tl.load(p_gate, mask=m_x, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + inner, mask=m_x, other=0.0).to(tl.float32)
    if ACT == 0:
        b_act = b_gate * tl.sigmoid(b_gate)
    else:  # x · (1 + tanh(z)) / 2 = x · sigmoid(2 z)
        z = 0.7978845608028654 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
        b_act = b_gate * tl.sigmoid(2 * z)
    tl.store(out + row * inner + o_x, b_act * b_up, mask=m_x)


def gated(gate_up: torch.Tensor, act: int) -> torch.Tensor:
    """`act`: SILU or GELU_TANH of kernels/gate.py. `gate_up` is dense."""
    num_rows, width = gate_up.shape
    inner = width // 2
    out = torch.empty((num_rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(inner, _BLOCK))
        _gate_kernel[grid](
            gate_up, out, inner, ACT=act, BLOCK=_BLOCK, num_warps=4, **overlap(out.device)
        )
    return out
