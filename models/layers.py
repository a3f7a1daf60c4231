"""Layers that the families are wired from. A weight is held once, see kernels/product.py."""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from paceline.kernels.gate import Activation, gelu_tanh
from paceline.kernels.product import Matrix
from paceline.kernels.quantized import ReorderedMatrix, hold_quantized
from paceline.models.config import ModelConfig
from paceline.models.quantization import Part
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
    """x @ weight + bias"""

    def __init__(self, matrix: Matrix, bias: torch.Tensor | None = None) -> None:
        self.matrix = matrix
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


class ColumnEmbedding:
    """Columns of a weight [hidden, vocab]: where it is tied, one copy serves both ends."""

    def __init__(self, layer: Linear) -> None:
        self.layer = layer

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer.matrix.columns(ids)


class LayerBuilder:
    """Makes layers from the tensors of a reader and counts their bytes."""

    def __init__(self, reader: WeightReader, source: ModelSource) -> None:
        self.reader = reader
        self.num_bytes = 0
        self._source = source
        self._quantization = source.quantization

    def linear(
        self,
        names: Sequence[str],
        num_in: int,
        num_out: Sequence[int],
        bias: bool,
        part: Part = Part.LAYER,
    ) -> Linear:
        """One product for several layers of Hugging Face's [out, in] weights, side by side."""
        matrix = self._stored(names, num_in, num_out, bias)
        if matrix is None:
            weight = self._empty(num_in, sum(num_out))
            for name, place in zip(names, weight.split(list(num_out), dim=1), strict=True):  # type: ignore[no-untyped-call]
                self.reader.copy_into(f"{name}.weight", place, transposed=True)
            matrix = self._quantization.hold(weight, part)
        self.num_bytes += matrix.num_bytes
        if not bias:
            return Linear(matrix)
        joined = self._counted(self._empty(sum(num_out)))
        for name, place in zip(names, joined.split(list(num_out)), strict=True):  # type: ignore[no-untyped-call]
            self.reader.copy_into(f"{name}.bias", place)
        return Linear(matrix, joined)

    def conv1d(self, name: str, num_in: int, num_out: int) -> Linear:
        """GPT-2's layer, whose weight lies [in, out] already."""
        weight = self._empty(num_in, num_out)
        self.reader.copy_into(f"{name}.weight", weight)
        matrix = self._quantization.hold(weight, Part.LAYER)
        self.num_bytes += matrix.num_bytes
        return Linear(matrix, self.vector(f"{name}.bias", num_out))

    def table(self, name: str, num_rows: int, num_columns: int) -> torch.Tensor:
        table = self._counted(self._empty(num_rows, num_columns))
        self.reader.copy_into(f"{name}.weight", table)
        return table

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`dtype`: one of its own."""
        vector = self._counted(self._empty(size, dtype=dtype))
        self.reader.copy_into(name, vector)
        return vector

    def embeddings(
        self, names: tuple[str, str], config: ModelConfig
    ) -> tuple[Embedding | ColumnEmbedding, Linear]:
        """Input and output layer, by their `names`."""
        embedding, head = names
        if config.tied_embeddings:
            shared = self._vocabulary(embedding, config)
            self.reader.check_copy(f"{head}.weight", f"{embedding}.weight")
            return ColumnEmbedding(shared), shared
        if self._quantization.rounds_tables:
            return ColumnEmbedding(self._vocabulary(embedding, config)), self._vocabulary(
                head, config
            )
        table = self.table(embedding, config.vocab_size, config.hidden_size)
        return Embedding(table), self._vocabulary(head, config)

    def _vocabulary(self, name: str, config: ModelConfig) -> Linear:
        return self.linear([name], config.hidden_size, [config.vocab_size], False, Part.VOCABULARY)

    def _stored(
        self, names: Sequence[str], num_in: int, num_out: Sequence[int], bias: bool
    ) -> Matrix | None:
        """From integers of the checkpoint, if it has them."""
        stored = self._quantization.read(self.reader, names, num_in, num_out)
        if stored is None:
            return None
        if not bias:
            for name in names:
                self.reader.check_zeros(f"{name}.bias")
        dtype, device = self._source.dtype, self._source.device
        matrix = hold_quantized(stored.weight, dtype, device)
        order = stored.order
        return matrix if order is None else ReorderedMatrix(matrix, order.to(device))

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._source.dtype, device=self._source.device)

    def _counted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes += tensor.nbytes
        return tensor
