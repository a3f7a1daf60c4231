"""A decode step of few rows on the CPU as a list of compiled calls with fixed arguments.

Ten operations a layer, each wrapped in tensors, cost Python nearly as much time as 4-bit weights
take to arrive. So the layers' calls are listed once for a number of rows, over buffers that all
layers share; a step fills in its inputs and calls down the list: 5.0 instead of 6.4 ms of CPU time
for SmolLM2-135M in 4 bits. The calls are those of the ordinary path, and so is each bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.kernels import native
from paceline.kernels.attention_cpu import fits_compiled
from paceline.kernels.gate import COMPILED, Activation
from paceline.kernels.kv_write import HeadScale
from paceline.kernels.product import CompiledMatrix
from paceline.models.base import ForwardBatch
from paceline.models.config import AttentionConfig, ModelConfig
from paceline.models.layers import Linear
from paceline.models.norms import RMSNorm

MAX_ROWS = 32  # beyond, products take the time

Floats = NDArray[np.float32]
Call = tuple[Callable[..., None], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer of the common shape: RMS norms before attention and MLP, and of heads at most."""

    norm_1: RMSNorm
    qkv: Linear
    head_scale: HeadScale | None
    attention: AttentionConfig
    rope_index: int | None
    out: Linear
    norm_2: RMSNorm
    gate_up: Linear
    act: Activation
    down: Linear

    def is_compiled(self) -> bool:
        linears = (self.qkv, self.out, self.gate_up, self.down)
        packed = all(isinstance(x.matrix, CompiledMatrix) for x in linears)
        norms = (self.norm_1.weight, self.norm_2.weight)
        is_plain = self.head_scale is None and self.act in COMPILED
        return packed and is_plain and all(native.takes(norm) for norm in norms)


class DecodeProgram:
    """For `num_rows` sequences over one pool. `pool` [pages, layers, 2, kv heads, 16, dim]."""

    def __init__(
        self,
        parts: Sequence[LayerParts],
        places: Sequence[tuple[int, int]],
        config: ModelConfig,
        pool: torch.Tensor,
        batch: ForwardBatch,
        tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """`places`: of each layer, its group and its index in a page."""
        num_rows = batch.token_ids.shape[0]
        self._pool = pool
        self._config = config
        self._num_rows = num_rows
        self._num_threads = torch.get_num_threads()
        self._widths = [2 * table.shape[1] for table in batch.block_tables]
        self._slots = [np.zeros(num_rows, np.int64) for _ in batch.slot_mappings]
        self._tables = [np.zeros((num_rows, width), np.int64) for width in self._widths]
        self._contexts = np.ones(num_rows, np.int64)
        self._starts = np.arange(num_rows + 1, dtype=np.int64)
        self._ropes = [tuple(torch.empty_like(x).contiguous() for x in pair) for pair in tables]
        self.hidden = torch.empty(num_rows, config.hidden_size)
        self._normed = self._buffer(config.hidden_size)
        self._qkv = self._buffer(parts[0].qkv.matrix.num_columns)
        self._attended = self._buffer(config.num_heads * config.head_dim)
        self._gate_up = self._buffer(parts[0].gate_up.matrix.num_columns)
        self._gated = self._buffer(self._gate_up.shape[1] // 2)
        self._calls = [
            call
            for layer, place in zip(parts, places, strict=True)
            for call in (*self._attention(layer, *place), *self._feed_forward(layer))
        ]

    def fits(self, pool: torch.Tensor, batch: ForwardBatch) -> bool:
        tables = zip(batch.block_tables, self._widths, strict=True)
        return (
            pool.data_ptr() == self._pool.data_ptr()
            and torch.get_num_threads() == self._num_threads
            and all(table.shape[1] <= width for table, width in tables)
        )

    def run(
        self,
        embedded: torch.Tensor,
        batch: ForwardBatch,
        tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """[T, hidden] after the last layer, in memory that the next run overwrites."""
        self.hidden.copy_(embedded)
        self._contexts[:] = batch.context_lens.numpy()
        for slots, given in zip(self._slots, batch.slot_mappings, strict=True):
            slots[:] = given.numpy()
        for table, pages in zip(self._tables, batch.block_tables, strict=True):
            table[:, : pages.shape[1]] = pages.numpy()
        for own, step in zip(self._ropes, tables, strict=True):
            for kept, new in zip(own, step, strict=True):
                kept.copy_(new)
        for function, arguments in self._calls:
            function(*arguments)
        return self.hidden

    def _buffer(self, size: int) -> Floats:
        return np.empty((self._num_rows, size), np.float32)

    def _attention(self, layer: LayerParts, group: int, place: int) -> list[Call]:
        module, config = native.module, self._config
        assert module is not None
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        pool, qkv = self._pool.numpy(), self._qkv.reshape(-1)
        stride, ends = self._qkv.shape[1], (self._num_threads, module.BEST_LEVEL)
        pages = (self._pool.shape[1], place)
        calls = [
            self._norm(layer.norm_1),
            self._product(layer.qkv, self._normed, self._qkv, False),
        ]
        if layer.rope_index is not None:
            cos, sin = (table.numpy() for table in self._ropes[layer.rope_index])
            sizes = (self._num_rows, heads + kv_heads, cos.shape[2])
            calls.append((module.rotate, (qkv, cos, sin, *sizes, stride, dim, cos.shape[2], *ends)))
        kv = qkv[heads * dim :]
        write = (kv, pool, self._slots[group], stride, 2 * kv_heads, dim, *pages)
        attention = layer.attention
        steps = (self._starts, self._contexts, self._tables[group])
        shape = (stride, heads, kv_heads, dim, *pages)
        scores = (attention.window, attention.scale, attention.softcap)
        return [
            *calls,
            (module.write_kv, (*write, self._num_threads)),
            (module.attend, (qkv, self._attended, pool, *steps, *shape, *scores, *ends)),
            self._product(layer.out, self._attended, self.hidden.numpy(), True),
        ]

    def _feed_forward(self, layer: LayerParts) -> list[Call]:
        module = native.module
        assert module is not None
        inner, act = self._gated.shape[1], COMPILED[layer.act]
        gate = (self._gate_up, self._gated, inner, act, self._num_threads, module.BEST_LEVEL)
        return [
            self._norm(layer.norm_2),
            self._product(layer.gate_up, self._normed, self._gate_up, False),
            (module.gate, gate),
            self._product(layer.down, self._gated, self.hidden.numpy(), True),
        ]

    def _norm(self, norm: RMSNorm) -> Call:
        module = native.module
        assert module is not None
        weight, size = norm.weight.numpy(), self._config.hidden_size
        ends = (size, norm.epsilon, self._num_threads, module.BEST_LEVEL)
        return module.rms_norm, (self.hidden.numpy(), weight, self._normed, *ends)

    def _product(self, layer: Linear, x: Floats, out: Floats, accumulate: bool) -> Call:
        matrix = layer.matrix
        assert isinstance(matrix, CompiledMatrix)
        bias = None if layer.bias is None else layer.bias.numpy()
        return matrix.call(x, bias, out, accumulate, self._num_threads)


class DecodePrograms:
    """The programs of a model, one for each number of rows that it meets."""

    def __init__(
        self, parts: Sequence[LayerParts], places: Sequence[tuple[int, int]], config: ModelConfig
    ) -> None:
        self._parts = parts
        self._places = places
        self._config = config
        self._programs: dict[int, DecodeProgram] = {}

    def find(
        self,
        pool: torch.Tensor,
        batch: ForwardBatch,
        tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> DecodeProgram | None:
        """None where the step is none of few rows that all decode."""
        num_rows = batch.token_ids.shape[0]
        if batch.prefills or not 0 < num_rows <= MAX_ROWS:
            return None
        program = self._programs.get(num_rows)
        if program is None or not program.fits(pool, batch):
            program = DecodeProgram(self._parts, self._places, self._config, pool, batch, tables)
            self._programs[num_rows] = program
        return program


def decode_programs(
    parts: Sequence[LayerParts | None],
    places: Sequence[tuple[int, int]],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodePrograms | None:
    """None where a layer is of another shape, or not all of it is compiled."""
    whole = [layer for layer in parts if layer is not None and layer.is_compiled()]
    on_cpu = device.type == "cpu" and dtype == torch.float32
    if not on_cpu or len(whole) < len(parts) or not fits_compiled(config.head_dim):
        return None
    return DecodePrograms(whole, places, config)
