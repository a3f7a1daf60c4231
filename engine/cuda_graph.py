"""Pure decode steps captured as CUDA graphs, one for each (batch rung, context rung) in use.

A graph reads static input buffers. A smaller batch is padded: its extra rows write to a scratch
page that belongs to nobody, and their logits are dropped.
"""

import contextlib
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.batch_state import TABLE_WIDTHS
from paceline.kernels.decode_inputs import DecodeInputs, DecodeRows, fill_inputs
from paceline.models.base import ForwardBatch, Model

# Rows of a product that cuBLAS is slow at: Llama-8B's gate and up took 103 µs with 128 rows on an
# H200, 64 with 120 and 65 with 136. Not for a model that multiplies few rows by kernels of ours.
_SLOW_ROWS = {128: 136}
_FIRST_CONTEXT_RUNG = 512  # tokens; rungs grow fourfold up to the longest sequence


@dataclass(frozen=True, slots=True)
class DecodeStep:
    rows: DecodeRows
    max_context_len: int


@dataclass(frozen=True, slots=True)
class Captured:
    graph: "torch.cuda.CUDAGraph"
    inputs: DecodeInputs  # static buffers
    batch: ForwardBatch  # of the same memory, and some that the graph reads besides: kept for it
    logits: torch.Tensor


class DecodeGraphs:
    """Captured at first use, or all ahead; replaying equals an eager step on the padded batch.

    `scratch_page`: a page of the pools that no sequence is ever given.
    """

    def __init__(
        self,
        model: Model,
        pools: tuple[torch.Tensor, ...],
        scratch_page: int,
        max_batch: int,
        max_length: int,
    ) -> None:
        self.model = model
        self.pools = pools
        self.scratch_page = scratch_page
        slow = {} if model.fuses_decodes else _SLOW_ROWS
        self.batch_rungs = [slow.get(num, num) for num in rungs(1, 2, max_batch)]
        self.context_rungs = rungs(_FIRST_CONTEXT_RUNG, 4, max_length)
        self.captured: dict[tuple[int, int], Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()  # shared by all: one runs at a time

    def all_rungs(self) -> list[tuple[int, int]]:
        """Largest first: the others fit into the memory that its capture takes."""
        pairs = [(num, context) for num in self.batch_rungs for context in self.context_rungs]
        return sorted(set(pairs), reverse=True)

    def replay(self, step: DecodeStep) -> torch.Tensor:
        """Logits of a pure decode batch, valid until the next replay of the same rungs."""
        num = len(step.rows.rows)
        rung = next(r for r in self.batch_rungs if r >= num)
        context = next(r for r in self.context_rungs if r >= step.max_context_len)
        captured = self.capture(rung, context)
        fill_inputs(captured.inputs, step.rows, self.scratch_page)
        captured.graph.replay()
        return captured.logits[:num]

    def capture(self, rung: int, context: int) -> Captured:
        """At the first call for these rungs."""
        if (rung, context) not in self.captured:
            self.captured[rung, context] = self._capture(rung, context)
        return self.captured[rung, context]

    def _capture(self, rung: int, context: int) -> Captured:
        num_groups = len(self.model.layout.groups)
        inputs = padded_inputs(rung, context, num_groups, self.scratch_page, self.pools[0].device)
        batch = decode_batch(inputs, context)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries allocate their workspaces outside the capture
                self.model.forward(batch, self.pools)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile, as those that copy KV do.
        stream = _capture_stream(torch.cuda.current_stream().priority)
        capture = torch.cuda.graph(
            graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"
        )
        with no_garbage_collection(), capture:
            logits = self.model.forward(batch, self.pools)
        return Captured(graph, inputs, batch, logits)


@functools.cache
def _capture_stream(priority: int) -> torch.cuda.Stream:
    """Its priority becomes that of the graph. One for all: memory freed on a stream is used again
    on that stream only."""
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Destroying an unreachable graph of another engine would invalidate a capture under way."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def rungs(first: int, factor: int, last: int) -> list[int]:
    """first, first · factor, … and `last`."""
    steps = []
    while first < last:
        steps.append(first)
        first *= factor
    return [*steps, last]


def padded_inputs(
    num_rows: int, max_context: int, num_groups: int, scratch_page: int, device: torch.device
) -> DecodeInputs:
    """Padding rows only: context 1, in the scratch page."""
    width = -(-max_context // (PAGE_TOKENS * TABLE_WIDTHS)) * TABLE_WIDTHS
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
    slots = zeros.new_full((num_groups, num_rows), scratch_page * PAGE_TOKENS)
    tables = zeros.new_full((num_groups, num_rows, width), scratch_page)
    return DecodeInputs(zeros, zeros.clone(), torch.ones_like(zeros), slots, tables)


def decode_batch(inputs: DecodeInputs, max_context: int) -> ForwardBatch:
    """What a model gets of `inputs`: views, which later steps fill anew."""
    num_rows = len(inputs.token_ids)
    counting = torch.arange(num_rows + 1, dtype=torch.int64, device=inputs.token_ids.device)
    return ForwardBatch(
        token_ids=inputs.token_ids,
        positions=inputs.positions,
        slot_mappings=tuple(inputs.slots),
        query_start=counting,
        context_lens=inputs.context_lens,
        block_tables=tuple(inputs.tables),
        logits_rows=counting[:-1],
        max_query_len=1,
        max_context_len=max_context,
        prefills=(),
        wants_last_rows=True,
    )
