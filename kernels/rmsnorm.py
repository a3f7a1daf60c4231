"""Root mean square norm: x / sqrt(mean(x²) + epsilon) · weight, statistics in float32."""

import torch

from paceline.kernels import native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [..., dim], weight [dim] → the type of x, rounded to that of the weight before it."""
    if weight.dim() == 1 and native.takes(x) and native.takes(weight):
        return rms_norm_cpu(x, weight, epsilon)
    wide = x.float()
    square_sum = (wide * wide).sum(dim=-1, keepdim=True)
    scale = square_sum.mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()
    return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)


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
