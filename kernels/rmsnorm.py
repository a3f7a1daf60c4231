"""Root mean square norm: x / sqrt(mean(x²) + epsilon) · weight, statistics in float32."""

import torch

from paceline.kernels import backend, native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [..., dim], weight [dim] → the type of x, rounded to that of the weight before it."""
    if _fits_triton(x):
        from paceline.kernels.gpu import rmsnorm

        return rmsnorm.rms_norm(x, weight, epsilon)
    if weight.dim() == 1 and native.takes(x) and native.takes(weight):
        return rms_norm_cpu(x, weight, epsilon)
    wide = x.float()
    square_sum = (wide * wide).sum(dim=-1, keepdim=True)
    scale = square_sum.mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()
    return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """residual + rms_norm(x, weight, epsilon), new memory; all [T, dim]."""
    if _fits_triton(x):
        from paceline.kernels.gpu import rmsnorm

        return rmsnorm.rms_norm(x, weight, epsilon, residual)
    return rms_norm(x, weight, epsilon).add_(residual)


def _fits_triton(x: torch.Tensor) -> bool:
    return x.dim() == 2 and x.stride(1) == 1 and backend.uses_triton(x)


def rms_norm_cpu(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, level: int | None = None
) -> torch.Tensor:
    """The same by compiled code. `level` of instructions: the best where it is not given."""
    assert native.module is not None
    out = x.new_empty(x.shape)
    native.module.rms_norm(
        x.contiguous().numpy(),
        weight.numpy(),
        out.numpy(),
        x.shape[-1],
        epsilon,
        torch.get_num_threads(),
        native.module.BEST_LEVEL if level is None else level,
    )
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The definition, row by row in float64."""
    rows = [row / (row @ row / len(row) + epsilon) ** 0.5 for row in x.double()]
    return (torch.stack(rows) * weight.double()).to(x.dtype)
