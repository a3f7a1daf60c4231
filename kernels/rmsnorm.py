"""Root mean square norm: x / sqrt(mean(x²) + epsilon) · weight, statistics in float32."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x [..., dim], weight [dim] → the type of x, rounded to that of the weight before it."""
    wide = x.float()
    square_sum = (wide * wide).sum(dim=-1, keepdim=True)
    scale = square_sum.mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()
    return (wide * scale).to(weight.dtype).mul_(weight).to(x.dtype)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The definition, row by row in float64."""
    rows = [row / (row @ row / len(row) + epsilon) ** 0.5 for row in x.double()]
    return (torch.stack(rows) * weight.double()).to(x.dtype)
