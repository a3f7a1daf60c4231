"""Gated activation: act(gate) · up, for gate and up side by side in one tensor [T, 2 · inner]."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from paceline.kernels import backend, native

Activation = Callable[[torch.Tensor], torch.Tensor]


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


SILU, GELU_TANH = 0, 1  # what compiled code and kernels call them
COMPILED: dict[Activation, int] = {F.silu: SILU, gelu_tanh: GELU_TANH}


def gated(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    """[T, 2 · inner] → [T, inner]"""
    if act in COMPILED and native.takes(gate_up):
        return gated_cpu(gate_up, act)
    if act in COMPILED and backend.uses_triton(gate_up):
        from paceline.kernels.gpu import gate as gpu

        return gpu.gated(gate_up, COMPILED[act])
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate) * up


def gated_cpu(gate_up: torch.Tensor, act: Activation, level: int | None = None) -> torch.Tensor:
    """The same by compiled code. `level` of instructions: the best where it is not given."""
    assert native.module is not None
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    native.module.gate(
        gate_up.contiguous().numpy(),
        out.numpy(),
        out.shape[1],
        COMPILED[act],
        torch.get_num_threads(),
        native.module.BEST_LEVEL if level is None else level,
    )
    return out


def gated_reference(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    """The definition, in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (act(gate) * up).to(gate_up.dtype)
