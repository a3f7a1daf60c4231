"""A step from its plan to what it brings, as the runner makes it and the engine holds it.

PlanArrays ─ Prepared ─ forward pass ─ Forwarded ─ sampling ─ Launched ─ collect ─ StepResult
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.cuda_graph import DecodeStep
from paceline.engine.messages import PositionLogprobs
from paceline.engine.pooling import Floats
from paceline.engine.pools import Sums, unsigned
from paceline.engine.position_logprobs import position_logprobs
from paceline.engine.promise import Promise
from paceline.engine.sampler import Drawn, SampleBatch, Sampled, collect
from paceline.kernels.token_scores import TokenScores
from paceline.models.base import ForwardBatch

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlanArrays:
    """A plan as arrays: of length B, except `contexts`-derived ones that say so."""

    rows: Int64s  # of the batch state
    lengths: Int64s  # new tokens
    contexts: Int64s  # after the step
    starts: Int64s  # [B + 1]
    num_draws: Int64s
    num_decodes: int


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """What P rows of logits are scored for; arrays of length P."""

    token_ids: Int64s  # that come next in the prompt
    num_top: Int64s  # best tokens that are asked for


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step before its launch. Without `samples` no sequence reaches its last token.

    The first rows of logits are drawn from, the others are scored. Behind them come the rows of
    hidden states that are `pooled`: how many for each sequence that wants some."""

    batch: ForwardBatch | DecodeStep
    samples: SampleBatch | None
    scores: ScoreBatch | None
    pooled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a forward pass brings: logits [R, vocab], and sums of hidden states [E, hidden]."""

    logits: torch.Tensor
    pooled: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has brought, on the host: `scored` and `pooled` in the order of the plan, sums in
    that of the promise."""

    promise: Promise
    sampled: Sampled
    scored: list[PositionLogprobs | None]
    pooled: list[Floats]
    block_sums: Sums
    tail_sums: list[Sums]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way. Nothing is drawn when no sequence reaches its last token."""

    promise: Promise
    samples: SampleBatch | None
    drawn: Drawn | None
    scores: TokenScores | None
    scored_for: ScoreBatch | None
    pooled: torch.Tensor | None
    block_sums: torch.Tensor | None
    tail_sums: list[torch.Tensor]
    done: "torch.cuda.Event | None"

    def collect(self) -> StepResult:
        """Waits for the step."""
        if self.done is not None:
            self.done.synchronize()
        sampled, scored = Sampled([], [], []), list[PositionLogprobs | None]()
        if self.drawn is not None and self.samples is not None:
            sampled = collect(self.drawn, self.samples)
        if self.scores is not None and self.scored_for is not None:
            batch = self.scored_for
            scored = position_logprobs(
                self.scores, batch.token_ids.tolist(), batch.num_top.tolist()
            )
        pooled = [] if self.pooled is None else list(self.pooled.numpy())
        block_sums = [] if self.block_sums is None else unsigned(self.block_sums)
        tail_sums = list(map(unsigned, self.tail_sums))
        return StepResult(self.promise, sampled, scored, pooled, block_sums, tail_sums)
