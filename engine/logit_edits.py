"""Edits of single logits before the draw, for all rows of a step at once.

    logit_bias            + bias
    processors            what they do
    repetition_penalty    of tokens in prompt or output: / penalty above 0, · penalty below
    frequency_penalty     of tokens in the output: - penalty · how often
    presence_penalty      of tokens in the output: - penalty
    min_tokens, bad_words masked: -inf, whatever the others say

The order is vLLM's. Only the few logits concerned are touched.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.logits_processors import PreparedCall, ProcessorRow
from paceline.engine.sequence import Sequence
from paceline.engine.token_counts import TokenCounts

Int64s = NDArray[np.int64]


class Sparse:
    """Values of (draw, id) pairs, collected a draw at a time."""

    def __init__(self, num_columns: int) -> None:
        self._draws: list[int] = []
        self._ids: list[Int64s] = []
        self._values: list[list[NDArray[np.float32]]] = [[] for _ in range(num_columns)]

    def add(self, draw: int, ids: Int64s, *values: NDArray[np.float32] | float) -> None:
        """`values`: one array (a number an id), or one number for all ids, for each column."""
        if len(ids):
            self._draws.append(draw)
            self._ids.append(ids)
            for column, value in zip(self._values, values, strict=True):
                column.append(np.broadcast_to(np.asarray(value, np.float32), ids.shape))

    def __bool__(self) -> bool:
        return bool(self._draws)

    def places(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """Indices into the flat logits."""
        rows = np.repeat(self._draws, [len(ids) for ids in self._ids])
        return torch.from_numpy(rows * vocab_size + np.concatenate(self._ids)).to(device)

    def column(self, index: int, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(self._values[index])).to(device)


@dataclass(slots=True)
class ProcessorRows:
    """The rows of a step that one processor changes."""

    call: PreparedCall
    draws: list[int] = field(default_factory=list)
    rows: list[ProcessorRow] = field(default_factory=list)


class LogitEdits:
    """Of one step; copies what it reads of the sequences."""

    def __init__(self, drawing: Iterable[tuple[int, Sequence]]) -> None:
        """Pairs (draw, sequence) of sequences that have edits."""
        self._biased = Sparse(1)
        self._masked = Sparse(0)
        self._penalised = Sparse(4)  # repetition, presence, frequency, count in the output
        self._processors: dict[str, ProcessorRows] = {}
        for draw, sequence in drawing:
            self._add(draw, sequence)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [S, vocab], one row a draw → an edited copy."""
        edited = logits.clone()
        flat, vocab_size, device = edited.view(-1), logits.shape[1], logits.device
        if self._biased:
            flat.index_add_(
                0, self._biased.places(vocab_size, device), self._biased.column(0, device)
            )
        for group in self._processors.values():
            draws = torch.tensor(group.draws, device=device)
            rows = edited[draws]
            group.call.apply(rows, group.rows)
            edited[draws] = rows
        if self._penalised:
            places = self._penalised.places(vocab_size, device)
            columns = (self._penalised.column(i, device) for i in range(4))
            flat[places] = penalised(flat[places], *columns)
        if self._masked:
            flat.index_fill_(0, self._masked.places(vocab_size, device), float("-inf"))
        return edited

    def _add(self, draw: int, sequence: Sequence) -> None:
        edits = sequence.group.edits
        if edits is None:
            return
        prompt, output = sequence.prompt, sequence.output
        self._biased.add(draw, edits.bias_ids, edits.bias_values)
        self._masked.add(draw, edits.masked_ids(output))
        sampling = edits.sampling
        if sampling.has_penalties:
            if sequence.counts is None:
                counted = prompt if sampling.repetition_penalty != 1 else prompt[:0]
                sequence.counts = TokenCounts(counted, output)
            counts = sequence.counts
            self._penalised.add(
                draw,
                counts.ids.copy(),
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
                counts.counts.astype(np.float32),
            )
        for call in edits.processors:
            rows = self._processors.setdefault(call.name, ProcessorRows(call))
            rows.draws.append(draw)
            rows.rows.append(ProcessorRow(call.prepared, prompt, output))


def penalised(
    logits: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    return scaled - frequency * counts - presence * (counts > 0)
