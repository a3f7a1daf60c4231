"""Log-probabilities of the tokens of a prompt, from the logits that prefill computes anyway."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.messages import PositionLogprobs

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """What P rows of logits are to be scored for; arrays of length P."""

    token_ids: Int64s  # that come next in the prompt
    num_top: Int64s  # best tokens that are asked for


@dataclass(frozen=True, slots=True)
class Scores:
    """Device tensors of one launch; `collect` waits for them."""

    logprobs: torch.Tensor  # [P] of the tokens
    ranks: torch.Tensor  # [P] how many tokens are at least as likely: from 1
    top_ids: torch.Tensor  # [P, k]
    top_logprobs: torch.Tensor

    def collect(self, batch: ScoreBatch) -> list[PositionLogprobs]:
        """One entry a row, on the host. Tokens that cannot come are no alternatives."""
        lists = zip(
            batch.token_ids.tolist(),
            batch.num_top.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            strict=True,
        )
        entries = []
        for token_id, num_top, logprob, rank, ids, top in lists:
            pairs = zip(ids[:num_top], top[:num_top], strict=True)
            finite = [(i, value) for i, value in pairs if value > float("-inf")]
            entries.append(PositionLogprobs(token_id, logprob, finite, rank))
        return entries


def score(logits: torch.Tensor, batch: ScoreBatch) -> Scores:
    """Launches scoring of `logits` [P, vocab], float32."""
    token_ids = torch.from_numpy(batch.token_ids).to(logits.device)
    chosen = logits.gather(1, token_ids[:, None])
    normaliser = logits.logsumexp(dim=1, keepdim=True)
    top, top_ids = logits.topk(min(int(batch.num_top.max()), logits.shape[1]), dim=1)
    ranks = (logits >= chosen).sum(dim=1)
    return Scores((chosen - normaliser)[:, 0], ranks, top_ids, top - normaliser)
