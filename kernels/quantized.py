"""Products with weights of 4 or 8 bits in groups of 32 along the input.

    weight[k, c] = scale[k / 32, c] · (number[k, c] - zero[k / 32, c])
    x[r, k]      ≈ step[r, k / 32] · integer[r, k],  step = max |x| / 127 over the group

A row of x is rounded to 8 bits, group by group, whatever the number of rows: a group's share is
then a sum of integers, exact in any order, times scale · step. Weights cost a quarter or an eighth
of the memory traffic of float32. Compiled code works on packed panels; elsewhere torch multiplies
by the same numbers, which is the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from paceline.kernels import native
from paceline.kernels.huge_pages import empty_on_huge_pages
from paceline.kernels.product import PANEL, Array, CompiledMatrix, Matrix, TorchMatrix

GROUP = 32  # of the input, for weights as for x
LEAST = 1e-30  # a group of x that is below counts as zeros


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight [in, out] of `bits` 4 or 8. A last group that is not full ends with any numbers."""

    bits: int
    depth: int
    numbers: torch.Tensor  # uint8 [groups · 32, out], below 2^bits
    scales: torch.Tensor  # float16 [groups, out]
    zeros: torch.Tensor | None  # float16 [groups, out]; None: 2^(bits - 1)

    def __post_init__(self) -> None:
        num_groups = -(-self.depth // GROUP)
        shape = (num_groups, self.numbers.shape[1])
        assert self.numbers.shape[0] == num_groups * GROUP and self.scales.shape == shape
        assert self.zeros is None or self.zeros.shape == shape

    @property
    def num_columns(self) -> int:
        return self.numbers.shape[1]

    def dequantized(self) -> torch.Tensor:
        """float32 [in, out]"""
        numbers = self.numbers.view(-1, GROUP, self.num_columns).float()
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros.float()[:, None]
        weight = (numbers - zeros) * self.scales.float()[:, None]
        return weight.flatten(0, 1)[: self.depth]


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, in] as its integers say; a row with a number that is not finite becomes NaN there."""
    depth = x.shape[1]
    groups = torch.unflatten(F.pad(x.float(), (0, -depth % GROUP)), 1, (-1, GROUP))
    highest = groups.abs().amax(dim=2, keepdim=True)
    # A Python number divided by a tensor is rounded twice, a new scalar would be copied from the
    # host, which a CUDA graph cannot hold.
    most = torch.full_like(highest, 127)
    inverse = torch.where(highest > LEAST, most / highest, 0)
    step = torch.where(highest > LEAST, highest / most, 0)  # NaN > LEAST is false
    step = torch.where(highest.isfinite(), step, torch.nan)
    rounded = (groups * inverse).round() * step
    return rounded.flatten(1)[:, :depth].to(x.dtype)


class TorchQuantizedMatrix:
    """The definition: rounded rows times the weight that the numbers stand for."""

    def __init__(self, quantized: Quantized, dtype: torch.dtype, device: torch.device) -> None:
        self.matrix = TorchMatrix(quantized.dequantized().to(device, dtype))

    @property
    def num_columns(self) -> int:
        return self.matrix.num_columns

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.matrix.multiply(round_rows(x), bias)

    def add_product(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.matrix.add_product(out, round_rows(x), bias)

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        return self.matrix.columns(ids)


class PackedQuantizedMatrix(CompiledMatrix):
    """`blocks` [panels, groups, bytes]; _native_quantized.c says what a block holds."""

    def __init__(self, quantized: Quantized, level: int | None = None) -> None:
        """`level` of instructions: the best where it is not given."""
        assert native.module is not None
        self.bits, self.depth = quantized.bits, quantized.depth
        self.num_columns = quantized.num_columns
        self.has_zeros = quantized.zeros is not None
        self.blocks = _packed(quantized)
        self._memory = self.blocks.numpy()
        self._level = native.module.BEST_LEVEL if level is None else level
        self._product = native.module.quantized_product

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        heads, numbers = self.blocks.split(_block_parts(self.bits, self.has_zeros), dim=2)  # type: ignore[no-untyped-call]
        panels, places = ids // PANEL, ids % PANEL
        head = _by_column(heads)[panels, :, :, places].float()
        quads = torch.unflatten(numbers, 2, (-1, PANEL, 4))[panels, :, :, places]
        if self.bits == 4:
            quads = torch.stack((quads & 15, quads >> 4), dim=3)
        zeros = head[:, :, 1, None] if self.has_zeros else 1 << (self.bits - 1)
        rows = (quads.flatten(2).float() - zeros) * head[:, :, 0, None]
        return rows.flatten(1)[:, : self.depth].contiguous()

    def call(
        self, x: Array, bias: Array | None, out: Array, accumulate: bool, num_threads: int
    ) -> tuple[Callable[..., None], tuple[Any, ...]]:
        sizes = (len(x), self.depth, self.num_columns, self.bits, self.has_zeros)
        ends = (accumulate, num_threads, self._level)
        return self._product, (x, self._memory, bias, out, *sizes, *ends)


class ReorderedMatrix:
    """A matrix whose rows are those of the weight in another order: GPTQ sorts them by group."""

    def __init__(self, matrix: Matrix, order: torch.Tensor) -> None:
        """`order` [in]: where row k of `matrix` stands in the weight."""
        self.matrix = matrix
        self.order = order

    @property
    def num_columns(self) -> int:
        return self.matrix.num_columns

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes + self.order.nbytes

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self.matrix.multiply(x.index_select(1, self.order), bias)

    def add_product(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.matrix.add_product(out, x.index_select(1, self.order), bias)

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        columns = self.matrix.columns(ids)
        return torch.empty_like(columns).index_copy_(1, self.order, columns)


def hold_quantized(quantized: Quantized, dtype: torch.dtype, device: torch.device) -> Matrix:
    """In the fastest layout for `x` of that type and place."""
    if native.takes(torch.empty(0, dtype=dtype, device=device)):
        return PackedQuantizedMatrix(quantized)
    return TorchQuantizedMatrix(quantized, dtype, device)


def _block_parts(bits: int, has_zeros: bool) -> list[int]:
    """Bytes of a block's scales and zeros, and of its numbers."""
    return [PANEL * 2 * (1 + has_zeros), GROUP * PANEL * bits // 8]


def _by_column(heads: torch.Tensor) -> torch.Tensor:
    """[panels, groups, bytes] → [panels, groups, scale and zero, PANEL]"""
    return torch.unflatten(heads.view(torch.float16), 2, (-1, PANEL))


def _packed(quantized: Quantized) -> torch.Tensor:
    parts = _block_parts(quantized.bits, quantized.zeros is not None)
    num_groups, num_columns = quantized.scales.shape
    num_panels = -(-num_columns // PANEL)
    blocks = empty_on_huge_pages((num_panels, num_groups, sum(parts)), torch.uint8)
    heads, numbers = blocks.split(parts, dim=2)  # type: ignore[no-untyped-call]
    places = _by_column(heads)
    for i, head in enumerate((quantized.scales, quantized.zeros)):
        if head is not None:
            places[:, :, i] = _in_panels(head).movedim(1, 0)
    quads = _in_panels(quantized.numbers).view(num_groups, GROUP // 4, 4, num_panels, PANEL)
    if quantized.bits == 4:
        quads = quads[:, 0::2] | quads[:, 1::2] << 4
    torch.unflatten(numbers, 2, (-1, PANEL, 4))[:] = quads.permute(3, 0, 1, 4, 2)
    return blocks


def _in_panels(rows: torch.Tensor) -> torch.Tensor:
    """[rows, out] → [rows, panels, PANEL], padded with zeros"""
    padded = F.pad(rows, (0, -rows.shape[1] % PANEL))
    return padded.view(len(rows), -1, PANEL)
