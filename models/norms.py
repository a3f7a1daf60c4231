"""Norms of whole rows, and of all query and key heads of an attention."""

from typing import Protocol

import torch
from torch.nn import functional as F

from paceline.kernels.rmsnorm import add_rms_norm, rms_norm


class Norm(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] → [T, hidden]"""
        ...


class NoNorm:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


class RMSNorm:
    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self.weight = weight
        self.epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.epsilon)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the norm of x, new memory."""
        return add_rms_norm(residual, x, self.weight, self.epsilon)


class LayerNorm:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> None:
        self.weight = weight
        self.bias = bias
        self.epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class WholeNorm:
    """RMS norm over all query heads, and over all key heads."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, epsilon: float) -> None:
        self.parts = (query, key)
        self.epsilon = epsilon

    def apply_(self, qkv: torch.Tensor) -> None:
        """qkv [T, query, key and value heads, dim]: normalises queries and keys in place."""
        num_tokens, dim = qkv.shape[0], qkv.shape[2]
        first = 0
        for weight in self.parts:
            last = first + len(weight) // dim
            row = qkv[:, first:last].view(num_tokens, -1)
            row.copy_(rms_norm(row, weight, self.epsilon))
            first = last
