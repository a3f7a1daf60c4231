"""Products with a weight that lives as long as its model: x @ weight (+ bias).

On the CPU in float32 the weight is packed for compiled code: panels of 32 columns, each [in, 32],
read front to back once a product. Elsewhere torch multiplies by [in, out], which is the reference.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from paceline.kernels import native
from paceline.kernels.huge_pages import empty_on_huge_pages

PANEL = 32  # columns
Array = NDArray[Any]


class Matrix(Protocol):
    """A weight [in, out], held once, in the layout that multiplies fastest."""

    @property
    def num_columns(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        ...

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] → x @ weight + bias, [T, out]."""
        ...

    def add_product(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """out [T, out] += x @ weight + bias."""
        ...

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """The columns `ids`, as rows [n, in]."""
        ...


class TorchMatrix:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @property
    def num_columns(self) -> int:
        return self.weight.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is None:
            return torch.mm(x, self.weight)
        return torch.addmm(bias, x, self.weight)

    def add_product(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        out.addmm_(x, self.weight)
        if bias is not None:
            out.add_(bias)

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        # Not contiguous(): it leaves one row with strides (1, 1), which cuBLAS refuses.
        columns = self.weight.index_select(1, ids).t()
        return columns.clone(memory_format=torch.contiguous_format)


class CompiledMatrix(ABC):
    """One that compiled code multiplies by, on the CPU."""

    num_columns: int

    @abstractmethod
    def call(
        self, x: Array, bias: Array | None, out: Array, accumulate: bool, num_threads: int
    ) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """The compiled function and its arguments, for arrays that may be used again."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], self.num_columns)
        self._run(x, bias, out, False)
        return out

    def add_product(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._run(x, bias, out, True)

    def _run(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, accumulate: bool
    ) -> None:
        if not len(x):
            return
        arrays = (x.contiguous().numpy(), None if bias is None else bias.numpy(), out.numpy())
        function, arguments = self.call(*arrays, accumulate, torch.get_num_threads())
        function(*arguments)


class PackedMatrix(CompiledMatrix):
    """`panels` [ceil(out / PANEL), in, PANEL]; the last one is padded with zeros."""

    def __init__(self, weight: torch.Tensor, level: int | None = None) -> None:
        """`level` of instructions: the best where it is not given."""
        assert native.module is not None
        self.depth, self.num_columns = weight.shape
        self.panels = _packed(weight)
        self._memory = self.panels.numpy()
        self._level = native.module.BEST_LEVEL if level is None else level
        self._product = native.module.product

    @property
    def num_bytes(self) -> int:
        return self.panels.nbytes

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        return self.panels[ids // PANEL, :, ids % PANEL]

    def call(
        self, x: Array, bias: Array | None, out: Array, accumulate: bool, num_threads: int
    ) -> tuple[Callable[..., None], tuple[Any, ...]]:
        sizes = (len(x), self.depth, self.num_columns)
        ends = (accumulate, num_threads, self._level)
        return self._product, (x, self._memory, bias, out, *sizes, *ends)


def hold(weight: torch.Tensor) -> Matrix:
    """`weight` [in, out] in the fastest layout; the caller lets go of its own."""
    return PackedMatrix(weight) if native.takes(weight) else TorchMatrix(weight)


def _packed(weight: torch.Tensor) -> torch.Tensor:
    depth, num_columns = weight.shape
    num_whole = num_columns // PANEL
    panels = empty_on_huge_pages((-(-num_columns // PANEL), depth, PANEL), weight.dtype)
    whole, rest = weight.split([num_whole * PANEL, num_columns % PANEL], dim=1)  # type: ignore[no-untyped-call]
    panels[:num_whole] = whole.view(depth, num_whole, PANEL).transpose(0, 1)
    if num_columns % PANEL:
        panels[-1, :, : num_columns % PANEL] = rest
    return panels
