"""Pure decode steps captured as CUDA graphs, one for each (batch rung, context rung) in use.

A graph reads static input buffers. A smaller batch is padded: its extra rows write to a scratch
page that belongs to nobody, and their logits are dropped.
"""

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Iterator

import torch

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.models.base import ForwardBatch, Model

# Rows of a product that cuBLAS is slow at: Llama-8B's gate and up took 103 µs with 128 rows on an
# H200, 64 with 120 and 65 with 136.
_SLOW_ROWS = {128: 136}
_FIRST_CONTEXT_RUNG = 512  # tokens; rungs grow fourfold up to the longest sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Captured:
    graph: "torch.cuda.CUDAGraph"
    batch: ForwardBatch  # static buffers
    logits: torch.Tensor


class DecodeGraphs:
    """Captures at first use; replaying equals an eager step on the padded batch.

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
        self.batch_rungs = [_SLOW_ROWS.get(num, num) for num in rungs(1, 2, max_batch)]
        self.context_rungs = rungs(_FIRST_CONTEXT_RUNG, 4, max_length)
        self.captured: dict[tuple[int, int], Captured] = {}

    def fits(self, batch: ForwardBatch) -> bool:
        pure = not batch.prefills and len(batch.logits_rows) == len(batch.token_ids)
        return pure and len(batch.token_ids) <= self.batch_rungs[-1]

    def replay(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of a pure decode batch, valid until the next replay of the same rungs."""
        num = len(batch.token_ids)
        rung = next(r for r in self.batch_rungs if r >= num)
        context = next(r for r in self.context_rungs if r >= batch.max_context_len)
        captured = self.captured.get((rung, context))
        if captured is None:
            captured = self.captured[rung, context] = self._capture(rung, context)
        fill(captured.batch, batch, self.scratch_page)
        captured.graph.replay()
        return captured.logits[:num]

    def _capture(self, rung: int, context: int) -> Captured:
        batch = padded_batch(
            rung,
            context,
            self.scratch_page,
            self.pools[0].device,
            len(self.model.layout.groups),
        )
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # libraries allocate their workspaces outside the capture
                self.model.forward(batch, self.pools)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile, as those that copy KV do.
        stream = _capture_stream(torch.cuda.current_stream().priority)
        capture = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
        with no_garbage_collection(), capture:
            logits = self.model.forward(batch, self.pools)
        return Captured(graph, batch, logits)


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


def padded_batch(
    num_rows: int,
    max_context: int,
    scratch_page: int,
    device: torch.device,
    num_page_groups: int = 1,
) -> ForwardBatch:
    """A decode batch of padding rows only: context 1, in the scratch page."""
    num_blocks = -(-max_context // PAGE_TOKENS)
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
    counting = torch.arange(num_rows + 1, dtype=torch.int64, device=device)
    return ForwardBatch(
        token_ids=zeros,
        positions=zeros.clone(),
        slot_mappings=tuple(
            torch.full_like(zeros, scratch_page * PAGE_TOKENS) for _ in range(num_page_groups)
        ),
        query_start=counting,
        context_lens=torch.ones_like(zeros),
        block_tables=tuple(
            torch.full((num_rows, num_blocks), scratch_page, dtype=torch.int64, device=device)
            for _ in range(num_page_groups)
        ),
        logits_rows=counting[:-1].clone(),
        max_query_len=1,
        max_context_len=max_context,
        prefills=(),
    )


def fill(static: ForwardBatch, batch: ForwardBatch, scratch_page: int) -> None:
    """Copies `batch` into the first rows of `static` and makes the others padding."""
    num = len(batch.token_ids)
    static.token_ids[:num].copy_(batch.token_ids)
    static.positions[:num].copy_(batch.positions)
    static.context_lens[:num].copy_(batch.context_lens)
    static.token_ids[num:].zero_()
    static.positions[num:].zero_()
    static.context_lens[num:].fill_(1)
    for slots, own in zip(static.slot_mappings, batch.slot_mappings, strict=True):
        slots[:num].copy_(own)
        slots[num:].fill_(scratch_page * PAGE_TOKENS)
    for table, own in zip(static.block_tables, batch.block_tables, strict=True):
        table[:num, : own.shape[1]].copy_(own)
        table[num:].fill_(scratch_page)
