"""Next tokens for a batch of logits rows, without a loop over requests or the vocabulary.

Filters reduce to one threshold a row: tokens whose scaled logit lies below it cannot be drawn.
Noise is made for the others. Ties at a threshold survive together, so that a result does not
depend on the order of a sort.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.messages import PositionLogprobs
from paceline.engine.noise import gumbel, noise_keys
from paceline.kernels.row_max import row_max

_CANDIDATES = 256  # of a row, sorted first; more only when top_p reaches beyond them
_NOISE_AT_ONCE = 1 << 18  # numbers: what stays in the caches of a CPU core


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """What to sample: S draws from R rows of logits, arrays of length S."""

    rows: NDArray[np.int64]  # of logits; a row is drawn from once a choice
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    seed: NDArray[np.int64]
    choice: NDArray[np.int64]
    position: NDArray[np.int64]  # of the output token
    num_logprobs: NDArray[np.int64]
    masks: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (draw, token ids that may not come)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Device tensors of one launch; `collect` waits for them."""

    token_ids: torch.Tensor  # [S]
    best: torch.Tensor  # [S] largest logit; not finite: the row is unusable
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
    allowed = _masked(logits, batch) if batch.masks else logits
    best, token_ids = row_max(allowed)
    random = np.flatnonzero(batch.temperature > 0)
    if len(random):
        indices = torch.from_numpy(random).to(device)
        rows = allowed if len(random) == len(batch) else allowed[indices]
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


def _masked(logits: torch.Tensor, batch: SampleBatch) -> torch.Tensor:
    draws = np.repeat([draw for draw, _ in batch.masks], [len(ids) for _, ids in batch.masks])
    ids = np.concatenate([np.asarray(ids, np.int64) for _, ids in batch.masks])
    known = ids < logits.shape[1]
    masked = logits.clone()
    device = logits.device
    where = torch.from_numpy(draws[known]).to(device), torch.from_numpy(ids[known]).to(device)
    masked[where] = float("-inf")
    return masked


def _draw(
    logits: torch.Tensor, best: torch.Tensor, batch: SampleBatch, random: NDArray[np.int64]
) -> torch.Tensor:
    """Gumbel-max over the survivors of each row."""
    device = logits.device
    temperature = torch.from_numpy(batch.temperature[random]).to(device)
    scaled = (logits - best[:, None]).div_(temperature[:, None])
    arrays = (batch.seed[random], batch.choice[random], batch.position[random])
    keys = noise_keys(*(torch.from_numpy(array).to(device) for array in arrays))[:, None]
    top_k, top_p = batch.top_k[random], batch.top_p[random]
    is_cut = (top_k > 0) | (top_p < 1)
    cut = np.flatnonzero(is_cut)
    if not len(cut):
        return _draw_open(scaled, keys)
    if len(cut) == len(random):
        return _draw_cut(scaled, keys, top_k, top_p)
    indices = torch.from_numpy(cut).to(device)
    others = torch.from_numpy(np.flatnonzero(~is_cut)).to(device)
    token_ids = torch.empty(len(random), dtype=torch.int64, device=device)
    token_ids[indices] = _draw_cut(scaled[indices], keys[indices], top_k[cut], top_p[cut])
    token_ids[others] = _draw_open(scaled[others], keys[others])
    return token_ids


def _draw_open(scaled: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Every token may come. A few rows at once: the noise of all would be large."""
    ids = torch.arange(scaled.shape[1], device=scaled.device)
    num_rows = max(1, _NOISE_AT_ONCE // scaled.shape[1])
    parts = zip(torch.split(scaled, num_rows), torch.split(keys, num_rows), strict=True)
    return torch.cat([gumbel(key, ids).add_(part).max(dim=1).indices for part, key in parts])


def _draw_cut(
    scaled: torch.Tensor, keys: torch.Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]
) -> torch.Tensor:
    """Noise for the survivors alone, gathered, unless they are most of the vocabulary."""
    thresholds = _filter_thresholds(scaled, top_k, top_p)[:, None]
    num_survivors = int((scaled >= thresholds).count_nonzero(dim=1).max())
    if num_survivors > scaled.shape[1] // 8:
        return _draw_open(scaled.masked_fill(scaled < thresholds, float("-inf")), keys)
    values, ids = scaled.topk(max(1, num_survivors), dim=1)
    scores = gumbel(keys, ids).add_(values).masked_fill_(values < thresholds, float("-inf"))
    return ids.gather(1, scores.max(dim=1).indices[:, None])[:, 0]


def _filter_thresholds(
    scaled: torch.Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]
) -> torch.Tensor:
    """Smallest scaled logit that top_k, then top_p keep. Scaled logits are at most 0."""
    vocab_size = scaled.shape[1]
    kept = np.where((top_k == 0) | (top_k > vocab_size), vocab_size, top_k)
    num_kept = torch.from_numpy(kept).to(scaled.device)
    share = torch.from_numpy(top_p).to(scaled.device)
    whole_mass = scaled.exp().sum(dim=1)
    num_sorted = max(_CANDIDATES, int(kept[kept < vocab_size].max(initial=0)))
    thresholds, reached = _cut(scaled, min(num_sorted, vocab_size), num_kept, share, whole_mass)
    while num_sorted < vocab_size and not bool(reached.all()):
        num_sorted *= 16
        rows = torch.nonzero(~reached)[:, 0]
        arrays = (num_kept[rows], share[rows], whole_mass[rows])
        found = _cut(scaled[rows], min(num_sorted, vocab_size), *arrays)
        thresholds[rows], reached[rows] = found
    return thresholds


def _cut(
    scaled: torch.Tensor,
    num_sorted: int,
    num_kept: torch.Tensor,
    share: torch.Tensor,
    whole_mass: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Thresholds from the `num_sorted` best of each row, and whether those were enough."""
    values = scaled.topk(num_sorted, dim=1).values
    ranks = torch.arange(num_sorted, device=scaled.device)
    in_top_k = ranks < num_kept[:, None]
    masses = torch.where(in_top_k, values.exp(), 0.0)
    cumulative = masses.cumsum(dim=1)
    # After top_k, top_p is a share of what top_k kept: known when all of that was sorted.
    mass = torch.where(num_kept <= num_sorted, cumulative[:, -1], whole_mass)
    before = cumulative - masses
    kept = in_top_k & (before < (share * mass)[:, None])
    last = kept.sum(dim=1).clamp(min=1) - 1
    # Rounding of the sum must not cut a row that keeps its whole mass.
    everything = share >= 1
    last = torch.where(everything, num_kept.clamp(max=num_sorted) - 1, last)
    reached = (num_kept <= num_sorted) | (cumulative[:, -1] >= share * mass)
    return values.gather(1, last[:, None])[:, 0], reached
