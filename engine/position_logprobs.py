"""Log-probabilities on the host, as they are sent."""

from collections.abc import Sequence

from paceline.engine.messages import PositionLogprobs
from paceline.kernels.token_scores import TokenScores


def position_logprobs(
    scores: TokenScores, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[PositionLogprobs | None]:
    """One entry a row; None where `num_top` is negative. `scores` lie on the host."""
    lists = zip(
        token_ids,
        num_top,
        scores.logprobs.tolist(),
        scores.ranks.tolist(),
        scores.top_ids.tolist(),
        scores.top_logprobs.tolist(),
        strict=True,
    )
    return [_entry(*row) if row[1] >= 0 else None for row in lists]


def _entry(
    token_id: int, num_top: int, logprob: float, rank: int, ids: list[int], top: list[float]
) -> PositionLogprobs:
    """A token that cannot come is no alternative."""
    pairs = zip(ids[:num_top], top[:num_top], strict=True)
    finite = [(i, value) for i, value in pairs if value > float("-inf")]
    return PositionLogprobs(token_id, logprob, finite, rank)
