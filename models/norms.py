"""Norms of whole rows, and of the query and key heads of an attention."""

from typing import Protocol

import torch
from torch.nn import functional as F

from paceline.kernels.rmsnorm import rms_norm


class Norm(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] → [T, hidden]"""
        ...


class QueryKeyNorm(Protocol):
    def apply_(self, qkv: torch.Tensor) -> None:
        """qkv [T, query, key and value heads, dim]: normalises queries and keys in place."""
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


class LayerNorm:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> None:
        self.weight = weight
        self.bias = bias
        self.epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class HeadNorm:
    """RMS norm of each query head and each key head."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        epsilon: float,
    ) -> None:
        self.weight = torch.cat((query.expand(num_heads, -1), key.expand(num_kv_heads, -1)))
        self.epsilon = epsilon

    def apply_(self, qkv: torch.Tensor) -> None:
        heads = qkv[:, : len(self.weight)]
        heads.copy_(rms_norm(heads, self.weight, self.epsilon))


class WholeNorm:
    """RMS norm over all query heads, and over all key heads."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, epsilon: float) -> None:
        self.parts = (query, key)
        self.epsilon = epsilon

    def apply_(self, qkv: torch.Tensor) -> None:
        num_tokens, dim = qkv.shape[0], qkv.shape[2]
        first = 0
        for weight in self.parts:
            last = first + len(weight) // dim
            row = qkv[:, first:last].view(num_tokens, -1)
            row.copy_(rms_norm(row, weight, self.epsilon))
            first = last
