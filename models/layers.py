"""Layers that the families are wired from. A weight is held once, see kernels/product.py."""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from paceline.kernels.gate import Activation, gelu_tanh
from paceline.kernels.product import hold
from paceline.models.config import ModelConfig
from paceline.models.registry import ModelSource
from paceline.models.weights import WeightReader

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_python": F.gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "linear": lambda x: x,
    "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


class Linear:
    """x @ weight + bias; takes over a weight [in, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.matrix = hold(weight)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.matrix.multiply(x, self.bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x @ weight + bias, in place of `residual`."""
        self.matrix.add_product(residual, x, self.bias)
        return residual


class Embedding:
    """Rows of a table [vocab, hidden]."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table.index_select(0, ids)


class TiedEmbedding:
    """Columns of the output layer's weight [hidden, vocab]: one copy serves both ends."""

    def __init__(self, head: Linear) -> None:
        self.head = head

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head.matrix.columns(ids)


class LayerBuilder:
    """Makes layers from the tensors of a reader and counts their bytes."""

    def __init__(self, reader: WeightReader, source: ModelSource) -> None:
        self.reader = reader
        self.num_bytes = 0
        self._source = source

    def linear(
        self, names: Sequence[str], num_in: int, num_out: Sequence[int], bias: bool
    ) -> Linear:
        """One product for several layers of Hugging Face's [out, in] weights, side by side."""
        weight = self._empty(num_in, sum(num_out))
        for name, place in zip(names, weight.split(list(num_out), dim=1), strict=True):  # type: ignore[no-untyped-call]
            self.reader.copy_into(f"{name}.weight", place, transposed=True)
        if not bias:
            return Linear(weight)
        joined = self._empty(sum(num_out))
        for name, place in zip(names, joined.split(list(num_out)), strict=True):  # type: ignore[no-untyped-call]
            self.reader.copy_into(f"{name}.bias", place)
        return Linear(weight, joined)

    def conv1d(self, name: str, num_in: int, num_out: int) -> Linear:
        """GPT-2's layer, whose weight lies [in, out] already."""
        return Linear(self.table(name, num_in, num_out), self.vector(f"{name}.bias", num_out))

    def table(self, name: str, num_rows: int, num_columns: int) -> torch.Tensor:
        table = self._empty(num_rows, num_columns)
        self.reader.copy_into(f"{name}.weight", table)
        return table

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`dtype`: one of its own."""
        vector = self._empty(size, dtype=dtype)
        self.reader.copy_into(name, vector)
        return vector

    def embeddings(
        self, names: tuple[str, str], config: ModelConfig
    ) -> tuple[Embedding | TiedEmbedding, Linear]:
        """Input and output layer, by their `names`."""
        embedding, head = names
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        if not config.tied_embeddings:
            table = self.table(embedding, vocab_size, hidden_size)
            return Embedding(table), self.linear([head], hidden_size, [vocab_size], bias=False)
        shared = self.linear([embedding], hidden_size, [vocab_size], bias=False)
        self.reader.check_copy(f"{head}.weight", f"{embedding}.weight")
        return TiedEmbedding(shared), shared

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        place = torch.empty(shape, dtype=dtype or self._source.dtype, device=self._source.device)
        self.num_bytes += place.nbytes
        return place
