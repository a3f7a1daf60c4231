"""What follows the attention in a block: a gated product, or a choice of experts."""

from typing import Protocol

import torch

from paceline.kernels import backend
from paceline.kernels.gate import COMPILED, Activation, gated
from paceline.kernels.product import TorchMatrix
from paceline.models.config import ExpertsConfig
from paceline.models.layers import Linear

MIN_FUSED = 6144  # rows: fewer are as fast in two launches, as measured on an H200


class MLP(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] → [T, hidden], new memory."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the same, in place of `residual`."""
        ...


class GatedMLP:
    """down(act(gate(x)) · up(x)); gate and up are one product."""

    def __init__(self, gate_up: Linear, down: Linear, act: Activation) -> None:
        self.gate_up = gate_up
        self.down = down
        self.act = act

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._inner(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.down.add_to(residual, self._inner(x))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return gated_product(x, self.gate_up, self.act)


def gated_product(x: torch.Tensor, gate_up: Linear, act: Activation) -> torch.Tensor:
    """act(gate) · up, in one launch where that is faster."""
    matrix = gate_up.matrix
    is_plain = isinstance(matrix, TorchMatrix) and gate_up.bias is None and act in COMPILED
    if is_plain and backend.is_hopper(x.device) and len(x) >= MIN_FUSED:
        from paceline.kernels.gpu import gated_product as gpu

        assert isinstance(matrix, TorchMatrix)
        if gpu.fits(x, matrix.weight):
            return gpu.gated(x, matrix.weight, COMPILED[act])
    return gated(gate_up(x), act)


class Experts:
    """Each token goes to the experts that its router scores highest; their outputs are weighted.

    Tokens are grouped by expert: one product an expert that any token chose.
    """

    def __init__(self, router: Linear, experts: list[GatedMLP], config: ExpertsConfig) -> None:
        self.router = router
        self.experts = experts
        self.num_chosen = config.num_chosen
        self.normalized = config.normalized

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            self._add_all(out, x, weights, chosen)
        else:
            self._add_chosen(out, x, weights, chosen)
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and experts of every token, both [T, num_chosen]."""
        shares = torch.softmax(self.router(x).float(), dim=-1)
        weights, chosen = torch.topk(shares, self.num_chosen, dim=-1)
        if self.normalized:
            weights /= weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def _add_chosen(
        self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> None:
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        order = torch.argsort(chosen.flatten(), stable=True)
        tokens, shares = order // self.num_chosen, weights.flatten()[order, None]
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                part = slice(first, first + count)
                rows = tokens[part]
                out.index_add_(0, rows, expert(x[rows]) * shares[part])
                first += count

    def _add_all(
        self, out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> None:
        """In a CUDA graph nothing may depend on counts: every expert sees every token."""
        shares = x.new_zeros(len(x), len(self.experts)).scatter_(1, chosen, weights)
        for i, expert in enumerate(self.experts):
            out.addcmul_(expert(x), shares[:, i : i + 1])
