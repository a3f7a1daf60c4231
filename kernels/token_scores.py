"""Log-probability and rank of one token of each row, and the best tokens of the row.

logprob = x[id] - ln Σ e^x        rank = how many of x are at least x[id], so from 1
"""

from dataclasses import dataclass

import torch

from paceline.kernels import native


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of R rows; `top_…` [R, k], best first. -inf fills up a row without so many numbers."""

    logprobs: torch.Tensor  # [R]
    ranks: torch.Tensor  # [R] int64
    top_ids: torch.Tensor  # [R, k] int64
    top_logprobs: torch.Tensor


def token_scores(x: torch.Tensor, ids: torch.Tensor, num_top: int) -> TokenScores:
    """x [R, size] float32, ids [R] int64 → scores. In a row with NaN, the log-probabilities are
    NaN, or -inf."""
    if native.takes(x) and x.numel():
        return token_scores_cpu(x, ids, num_top)
    return token_scores_torch(x, ids, num_top)


def token_scores_cpu(
    x: torch.Tensor, ids: torch.Tensor, num_top: int, level: int | None = None
) -> TokenScores:
    """The same by compiled code. `level` of instructions: the best where it is not given."""
    assert native.module is not None
    num_rows, size = x.shape
    top = (num_rows, min(num_top, size))
    scores = TokenScores(
        x.new_empty(num_rows), torch.empty_like(ids), ids.new_empty(top), x.new_empty(top)
    )
    native.module.token_scores(
        x.contiguous().numpy(),
        ids.numpy(),
        scores.logprobs.numpy(),
        scores.ranks.numpy(),
        scores.top_ids.numpy(),
        scores.top_logprobs.numpy(),
        size,
        top[1],
        torch.get_num_threads(),
        native.module.BEST_LEVEL if level is None else level,
    )
    return scores


def token_scores_torch(x: torch.Tensor, ids: torch.Tensor, num_top: int) -> TokenScores:
    """Relative to the best of each row: its logarithm of a sum may be large."""
    best = x.amax(dim=1, keepdim=True)
    normaliser = (x - best).exp_().sum(dim=1, keepdim=True).log_()
    chosen = x.gather(1, ids[:, None])
    top, top_ids = x.topk(min(num_top, x.shape[1]), dim=1)
    ranks = (x >= chosen).sum(dim=1)
    logprobs = (chosen - best - normaliser)[:, 0]
    return TokenScores(logprobs, ranks, top_ids, top - best - normaliser)
