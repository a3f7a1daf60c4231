"""Next tokens for a batch of logits rows, without a loop over requests or the vocabulary.

In vLLM's order: edits of single logits (engine/logit_edits.py), temperature, min_p, top_k, top_p,
typical_p, and a draw. Filters reduce to two bounds a row: logits outside of them cannot be drawn.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.logit_edits import LogitEdits
from paceline.engine.messages import PositionLogprobs
from paceline.engine.noise import noise_keys
from paceline.kernels.gumbel_max import gumbel_max
from paceline.kernels.row_max import row_max
from paceline.kernels.token_filter import Filters, filter_bounds

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
    """Device tensors of one launch; `collect` waits for them."""

    token_ids: torch.Tensor  # [S]
    best: torch.Tensor  # [S] largest edited logit; not finite: the row is unusable
    logprobs: torch.Tensor | None  # [S] of the token
    top_ids: torch.Tensor | None  # [S, k]
    top_logprobs: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids: list[int]
    usable: list[bool]
    logprobs: list[PositionLogprobs | None]


def sample(logits: torch.Tensor, batch: SampleBatch) -> Drawn:
    """Launches sampling of `logits` [R, vocab], float32. Does not change them."""
    device = logits.device
    if len(batch) != len(logits) or not (batch.rows == np.arange(len(batch))).all():
        logits = logits[torch.from_numpy(batch.rows).to(device)]
    edited = logits if batch.edits is None else batch.edits.apply(logits)
    best, token_ids = row_max(edited)
    random = np.flatnonzero(batch.temperature > 0)
    if len(random):
        indices = torch.from_numpy(random).to(device)
        rows = edited if len(random) == len(batch) else edited[indices]
        token_ids[indices] = _draw(rows, best[indices], batch, random)
    return _with_logprobs(logits, token_ids, best, int(batch.num_logprobs.max(initial=-1)))


def collect(drawn: Drawn, batch: SampleBatch) -> Sampled:
    """The drawn tokens on the host."""
    token_ids = drawn.token_ids.tolist()
    usable = torch.isfinite(drawn.best).tolist()
    if drawn.logprobs is None or drawn.top_ids is None or drawn.top_logprobs is None:
        return Sampled(token_ids, usable, [None] * len(token_ids))
    lists = zip(
        batch.num_logprobs.tolist(),
        token_ids,
        drawn.logprobs.tolist(),
        drawn.top_ids.tolist(),
        drawn.top_logprobs.tolist(),
        strict=True,
    )
    return Sampled(token_ids, usable, [_position_logprobs(*row) for row in lists])


def _position_logprobs(
    wanted: int, token_id: int, logprob: float, top_ids: list[int], top: list[float]
) -> PositionLogprobs | None:
    """Only finite numbers: a token that cannot come is no alternative."""
    if wanted < 0:
        return None
    pairs = zip(top_ids[:wanted], top[:wanted], strict=True)
    finite = [(i, value) for i, value in pairs if value > float("-inf")]
    return PositionLogprobs(token_id, logprob, finite)


def _with_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, best: torch.Tensor, num_top: int
) -> Drawn:
    """Log-probabilities are of the unmodified logits, whatever the sampling parameters."""
    if num_top < 0:
        return Drawn(token_ids, best, None, None, None)
    normaliser = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, token_ids[:, None]) - normaliser
    top, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=1)
    return Drawn(token_ids, best, chosen[:, 0], top_ids, top - normaliser)


def _draw(
    logits: torch.Tensor, best: torch.Tensor, batch: SampleBatch, random: NDArray[np.int64]
) -> torch.Tensor:
    """Gumbel-max over what the filters leave of each row."""

    def column(array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array[random]).to(logits.device)

    temperature = column(batch.temperature)
    low, high = torch.full_like(best, _LOWEST), torch.full_like(best, torch.inf)
    filtered = np.flatnonzero(_is_filtered(batch)[random])
    if len(filtered):
        masses = column(batch.top_p), column(batch.typical_p)
        filters = Filters(column(batch.min_p), column(batch.top_k), *masses)
        rows = torch.from_numpy(filtered).to(logits.device)
        low[rows], high[rows] = _bounds(logits, best, temperature, filters, rows)
    keys = noise_keys(column(batch.seed), column(batch.choice), column(batch.position))
    return gumbel_max(logits, best, temperature, low, high, keys)


def _is_filtered(batch: SampleBatch) -> NDArray[np.bool_]:
    by_mass = (batch.top_p < 1) | (batch.typical_p < 1)
    is_filtered: NDArray[np.bool_] = by_mass | (batch.min_p > 0) | (batch.top_k > 0)
    return is_filtered


def _bounds(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    filters: Filters,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of some rows."""
    if len(rows) == len(logits):
        return filter_bounds(logits, best, temperature, filters)
    chosen = Filters(
        filters.min_p[rows], filters.top_k[rows], filters.top_p[rows], filters.typical_p[rows]
    )
    return filter_bounds(logits[rows], best[rows], temperature[rows], chosen)
