"""Log-probability and rank of one token of each row, and the best tokens of the row.

logprob = x[id] - ln Σ e^x        rank = how many of x are at least x[id], so from 1
"""

from dataclasses import dataclass

import torch

from paceline.kernels import native
from paceline.kernels.transfer import to_host


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of R rows; `top_…` [R, k], best first, of equals the lower id: fewer are the first of more.
    -inf fills up a row without so many numbers."""

    logprobs: torch.Tensor  # [R]
    ranks: torch.Tensor  # [R] int64
    top_ids: torch.Tensor  # [R, k] int64
    top_logprobs: torch.Tensor

    def to_host(self) -> "TokenScores":
        """Copies, as kernels/transfer.py makes them."""
        columns = (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return TokenScores(*map(to_host, columns))


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
    top, top_ids = _top(x, min(num_top, x.shape[1]))
    ranks = (x >= chosen).sum(dim=1)
    logprobs = (chosen - best - normaliser)[:, 0]
    return TokenScores(logprobs, ranks, top_ids, top - best - normaliser)


def _top(x: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """topk takes any of those that equal its last number, in any order; here the lower ids win."""
    if num_top == 0:
        return x[:, :0], x.new_empty((len(x), 0), dtype=torch.int64)
    top, ids = x.topk(num_top, dim=1)
    last = top[:, -1:]
    order = ids.argsort(dim=1)
    order = order.gather(1, top.gather(1, order).argsort(dim=1, descending=True, stable=True))
    top, ids = top.gather(1, order), ids.gather(1, order)
    all_ids = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    equals = torch.where(x == last, all_ids, x.shape[1] - 1)
    equals = equals.topk(num_top, dim=1, largest=False, sorted=True).values.long()
    num_above = (top > last).sum(dim=1, keepdim=True)
    places = torch.arange(num_top, device=x.device) - num_above
    return top, torch.where(places < 0, ids, equals.gather(1, places.clamp(min=0)))
