"""Next tokens for a batch of logits rows, without a loop over requests or the vocabulary.

In vLLM's order: edits of single logits (engine/logit_edits.py), temperature, min_p, top_k, top_p,
typical_p, and a draw. Filters reduce to two bounds a row: logits outside of them cannot be drawn.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.logit_edits import LogitEdits
from paceline.engine.messages import PositionLogprobs
from paceline.engine.noise import noise_keys
from paceline.engine.position_logprobs import position_logprobs
from paceline.kernels.gumbel_max import gumbel_max
from paceline.kernels.row_max import row_max
from paceline.kernels.rows import take_rows
from paceline.kernels.token_filter import Filters, filter_bounds
from paceline.kernels.token_scores import TokenScores, token_scores
from paceline.kernels.transfer import draws_to_host, to_device

_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """What to sample: S draws from R rows of logits, arrays of length S."""

    rows: NDArray[np.int64]  # of logits; a row is drawn from once a choice
    temperature: NDArray[np.float32]
    min_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    typical_p: NDArray[np.float32]
    seed: NDArray[np.int64]
    choice: NDArray[np.int64]
    position: NDArray[np.int64]  # of the output token
    num_logprobs: NDArray[np.int64]
    edits: LogitEdits | None = None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Of one launch. All but `next_ids` lie on the host once it has ended, for `collect`."""

    next_ids: torch.Tensor  # [S], the drawn tokens on the device
    token_ids: torch.Tensor  # [S]
    best: torch.Tensor  # [S] largest edited logit; not finite: nothing can be drawn
    scores: TokenScores | None  # of the unmodified logits, whatever the sampling parameters


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids: list[int]
    best: list[float]  # largest edited logit; -inf: all are masked; NaN, +inf: unusable
    logprobs: list[PositionLogprobs | None]
    failed: dict[int, str] = field(default_factory=dict)  # draws, and the processor that threw


def sample(logits: torch.Tensor, batch: SampleBatch) -> Drawn:
    """Launches sampling of `logits` [R, vocab], float32, and leaves them as they were."""
    if len(batch) != len(logits) or not (batch.rows == np.arange(len(batch))).all():
        logits = take_rows(logits, batch.rows)
    with nullcontext(logits) if batch.edits is None else batch.edits.applied(logits) as edited:
        best, token_ids = row_max(edited)
        random = np.flatnonzero(batch.temperature > 0)
        if len(random):
            _draw(edited, best, token_ids, batch, random)
    num_top = int(batch.num_logprobs.max(initial=-1))
    scores = token_scores(logits, token_ids, num_top).to_host() if num_top >= 0 else None
    return Drawn(token_ids, *draws_to_host(token_ids, best), scores)


def collect(drawn: Drawn, batch: SampleBatch) -> Sampled:
    """The drawn tokens of a launch that has ended."""
    token_ids = drawn.token_ids.tolist()
    logprobs: list[PositionLogprobs | None] = [None] * len(token_ids)
    if drawn.scores is not None:
        logprobs = position_logprobs(drawn.scores, token_ids, batch.num_logprobs.tolist())
    failed = {} if batch.edits is None else batch.edits.failed
    return Sampled(token_ids, drawn.best.tolist(), logprobs, failed)


def _draw(
    edited: torch.Tensor,
    best: torch.Tensor,
    token_ids: torch.Tensor,
    batch: SampleBatch,
    random: NDArray[np.int64],
) -> None:
    """Gumbel-max over what the filters leave of the rows `random`, into their `token_ids`."""
    drawn = (torch.from_numpy(c[random]) for c in (batch.seed, batch.choice, batch.position))
    noise = noise_keys(*drawn).numpy()  # on the host: each of its operations would be a launch
    indices, temperature, keys = to_device(edited.device, random, batch.temperature[random], noise)
    logits = edited if len(random) == len(batch) else take_rows(edited, random)
    best = best[indices]
    low, high = torch.full_like(best, _LOWEST), torch.full_like(best, torch.inf)
    filtered = np.flatnonzero(_is_filtered(batch)[random])
    if len(filtered):
        _bound(logits, best, temperature, low, high, batch, random, filtered)
    token_ids[indices] = gumbel_max(logits, best, temperature, low, high, keys)


def _is_filtered(batch: SampleBatch) -> NDArray[np.bool_]:
    by_mass = (batch.top_p < 1) | (batch.typical_p < 1)
    is_filtered: NDArray[np.bool_] = by_mass | (batch.min_p > 0) | (batch.top_k > 0)
    return is_filtered


def _bound(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    batch: SampleBatch,
    random: NDArray[np.int64],
    filtered: NDArray[np.int64],
) -> None:
    """Sets `low` and `high` of the rows `filtered` of those that are drawn from at random."""
    drawn = random[filtered]
    columns = (batch.min_p, batch.top_k, batch.top_p, batch.typical_p)
    rows, *chosen = to_device(logits.device, filtered, *(column[drawn] for column in columns))
    if len(filtered) < len(logits):
        logits, best, temperature = take_rows(logits, filtered), best[rows], temperature[rows]
    low[rows], high[rows] = filter_bounds(logits, best, temperature, Filters(*chosen))
