"""What the engine needs from a model, and what a model gets for one step."""

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.core.kv_layout import KVLayout


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Host-side lengths of one sequence that brings a chunk of its prompt."""

    query_len: int  # new tokens in this step
    context_len: int  # after this step: cached and earlier ones included


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step: T new tokens of B sequences, packed; all tensors on the model's device.

    Sequence b owns rows query_start[b]:query_start[b + 1]; its context after this step is
    context_lens[b] tokens, whose KV of page group g lies in pages
    block_tables[g][b, : ceil(context / PAGE_TOKENS)]. Blocks that none of its new tokens sees in a
    group with a window have no page there: their entries are 0 and must not be read.

    Order: the D = B - len(prefills) decode sequences come first, one row each (rows 0..D-1), then
    the prefill chunks, described on the host by `prefills`. A chunk of one token may be either.
    Padding a decode batch (CUDA graphs): a row with context_lens 1, position 0 and a slot in a
    page that nobody reads.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mappings: tuple[torch.Tensor, ...]  # by group, [T] int64: page * PAGE_TOKENS + offset,
    # where its KV is written
    query_start: torch.Tensor  # [B + 1] int64
    context_lens: torch.Tensor  # [B] int64
    block_tables: tuple[torch.Tensor, ...]  # by group, [B, max_blocks] int64, padded with 0
    logits_rows: torch.Tensor  # [R] int64: rows of T whose logits, or hidden states, are wanted
    max_query_len: int  # of the longest sequence: 1 means a pure decode step
    max_context_len: int  # upper bound over the decode sequences; the others' are in `prefills`
    prefills: tuple[PrefillChunk, ...]  # sequences D..B-1, in order; () is a pure decode step
    wants_last_rows: bool = False  # logits_rows are known to be query_start[1:] - 1


class Model(Protocol):
    """A causal language model over a paged pool."""

    vocab_size: int
    hidden_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    layout: KVLayout

    @property
    def fuses_decodes(self) -> bool:
        """Whether kernels of ours multiply the few rows of decode steps; then padding them to
        what a library is fast at gains nothing."""
        ...

    def forward(self, batch: ForwardBatch, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Writes the KV of the new tokens into `pools`, returns logits [R, vocab] in float32.

        `pools` has one tensor a rank of the layout, [num_pages, *layout.page.shape]: pages of all
        groups are alike. Only the mock model has several ranks in one process.
        """
        ...

    def hidden_states(self, batch: ForwardBatch, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """`forward` up to the last norm, without the projection to the vocabulary: [R, hidden]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The rest of it: [R, hidden] → [R, vocab] in float32."""
        ...

    def weight_bytes(self) -> int:
        """Bytes of parameters held in memory."""
        ...
