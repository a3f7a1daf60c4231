"""Edits of single logits before the draw, for all rows of a step at once.

    logit_bias            + bias
    processors            what they do
    repetition_penalty    of tokens in prompt or output: / penalty above 0, · penalty below
    frequency_penalty     of tokens in the output: - penalty · how often
    presence_penalty      of tokens in the output: - penalty
    min_tokens, bad_words masked: -inf, whatever the others say

The order is vLLM's. Only the few logits concerned are touched, in place, and put back afterwards;
processors get copies of their rows.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.logits_processors import PreparedCall, ProcessorRow
from paceline.engine.sequence import Sequence
from paceline.engine.token_counts import TokenCounts
from paceline.kernels.rows import put_numbers, put_rows, take_numbers, take_rows
from paceline.kernels.transfer import to_device

Int64s = NDArray[np.int64]
_SERIAL = 1 << 14  # numbers


class Sparse:
    """(draw, id) pairs, each with a value in every column, collected a draw at a time."""

    def __init__(self) -> None:
        self._draws: list[int] = []
        self._ids: list[Int64s] = []
        self._values: list[NDArray[np.float32]] = []  # a number an id
        self._constants: list[tuple[float, ...]] = []  # the same for all ids of a draw

    def add(
        self, draw: int, ids: Int64s, values: NDArray[np.float32] | None = None, *constants: float
    ) -> None:
        if len(ids):
            self._draws.append(draw)
            self._ids.append(ids)
            self._constants.append(constants)
            if values is not None:
                self._values.append(values)

    def __bool__(self) -> bool:
        return bool(self._draws)

    def places(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """Indices into the flat logits."""
        firsts = np.repeat(np.array(self._draws) * vocab_size, self._lengths)
        return to_device(device, firsts + np.concatenate(self._ids))[0]

    def values(self, device: torch.device) -> torch.Tensor:
        return to_device(device, np.concatenate(self._values))[0]

    def constants(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        columns = np.array(self._constants, np.float32).T
        return to_device(device, *(np.repeat(column, self._lengths) for column in columns))

    @property
    def _lengths(self) -> list[int]:
        return [len(ids) for ids in self._ids]


@dataclass(slots=True)
class ProcessorRows:
    """The rows of a step that one processor changes, each of them once."""

    call: PreparedCall
    draws: list[int] = field(default_factory=list)
    rows: list[ProcessorRow] = field(default_factory=list)
    is_split: bool = False  # it threw over several rows: each goes alone

    def apply(self, logits: torch.Tensor, failed: dict[int, str]) -> bool:
        """Puts draws over whose row the processor throws into `failed`, with its name; what has
        failed is left out. False if it throws over several rows, any of which may be spoilt."""
        left = [i for i, draw in enumerate(self.draws) if draw not in failed]
        if len(left) > 1 and not self.is_split:
            self.is_split = not self._apply_together(logits, left)
            return not self.is_split
        for i in left:
            draw = self.draws[i]
            if not self.call.apply(logits[draw : draw + 1], self.rows[i : i + 1]):
                failed[draw] = self.call.name
        return True

    def _apply_together(self, logits: torch.Tensor, left: list[int]) -> bool:
        if len(left) == len(logits):  # draws rise: these are all
            return self.call.apply(logits, self.rows)
        draws = np.array([self.draws[i] for i in left])
        rows = take_rows(logits, draws)
        is_applied = self.call.apply(rows, [self.rows[i] for i in left])
        put_rows(logits, draws, rows)
        return is_applied


class LogitEdits:
    """Of one step; copies what it reads of the sequences, but for processors: they get views of
    tokens, which nobody changes."""

    def __init__(self, drawing: Iterable[tuple[int, Sequence]]) -> None:
        """Pairs (draw, sequence) of sequences that have edits, draws rising."""
        self._biased = Sparse()
        self._masked = Sparse()
        self._penalised = Sparse()
        # By the place in a request's list: one that is named twice is applied twice, in order.
        self._processors: dict[tuple[int, str], ProcessorRows] = {}
        self.failed: dict[int, str] = {}  # once applied: draws, and the processor that threw
        for draw, sequence in drawing:
            self._add(draw, sequence)

    @contextmanager
    def applied(self, logits: torch.Tensor) -> Iterator[torch.Tensor]:
        """Edited logits [S, vocab], one row a draw; `logits` themselves are as before at the
        end."""
        if self._processors:
            yield self._processed(logits)
            return
        places, flat = self._places(logits), logits.view(-1)
        before = [take_numbers(flat, changed) for changed in places]
        try:
            self._apply(logits, places)
            yield logits
        finally:
            for changed, values in zip(places, before, strict=True):
                put_numbers(flat, changed, values)

    def _processed(self, logits: torch.Tensor) -> torch.Tensor:
        """An edited copy; a new one for each processor that has spoilt several rows."""
        places = self._places(logits)
        while True:
            edited = take_rows(logits, np.arange(len(logits)))
            if self._apply(edited, places):
                return edited

    def _places(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Of biased, penalised and masked logits."""
        none = torch.empty(0, dtype=torch.int64, device=logits.device)
        kinds = (self._biased, self._penalised, self._masked)
        return [kind.places(logits.shape[1], logits.device) if kind else none for kind in kinds]

    def _apply(self, logits: torch.Tensor, places: list[torch.Tensor]) -> bool:
        """False if a processor has spoilt them."""
        flat, device = logits.view(-1), logits.device
        biased, reached, masked = places
        if self._biased:
            flat.index_add_(0, biased, self._biased.values(device))
        for call in sorted(self._processors):
            if not self._processors[call].apply(logits, self.failed):
                return False
        if self._penalised:
            columns = (self._penalised.values(device), *self._penalised.constants(device))
            values = take_numbers(flat, reached)
            for part, *constants in zip(*map(parts, (values, *columns)), strict=True):
                part.copy_(penalised(part, *constants))
            put_numbers(flat, reached, values)
        flat.index_fill_(0, masked, float("-inf"))
        return True

    def _add(self, draw: int, sequence: Sequence) -> None:
        edits = sequence.group.edits
        if edits is None:
            return
        prompt, output, sampling = sequence.prompt, sequence.output, edits.sampling
        self._biased.add(draw, edits.bias_ids, edits.bias_values)
        self._masked.add(draw, edits.masked_ids(output))
        if sampling.has_penalties:
            if sequence.counts is None:
                counted = prompt if sampling.repetition_penalty != 1 else prompt[:0]
                sequence.counts = TokenCounts(counted, output)
            self._penalised.add(
                draw,
                sequence.counts.ids.copy(),
                sequence.counts.counts.astype(np.float32),
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
        for place, call in enumerate(edits.processors):
            rows = self._processors.setdefault((place, call.name), ProcessorRows(call))
            rows.draws.append(draw)
            rows.rows.append(ProcessorRow(call.prepared, _read_only(prompt), _read_only(output)))


def _read_only(tokens: Int64s) -> Int64s:
    view = tokens.view()
    view.flags.writeable = False
    return view


def parts(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Few enough at once on the CPU that torch does not share them out among threads, whose
    barriers take long on a busy machine."""
    at_once = _SERIAL if values.device.type == "cpu" else max(1, len(values))
    split: tuple[torch.Tensor, ...] = values.split(at_once)  # type: ignore[no-untyped-call]
    return split


def penalised(
    logits: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    return scaled - frequency * counts - presence * (counts > 0)
