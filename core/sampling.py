"""Sampling parameters of a request, checked once at the edge."""

import math
from dataclasses import dataclass

from paceline.core.errors import InvalidRequest

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
_check = InvalidRequest.check


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen.

    Randomness is a function of (seed, choice, position, token id) alone, so the seed is always
    set: a gateway that receives none draws one.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    min_p: float = 0.0  # 0 keeps all
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    typical_p: float = 1.0
    seed: int = 0
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int = -1  # -1: none; 0: the chosen token's; k: the k best too

    def __post_init__(self) -> None:
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "must be at least 1")
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, "must not be negative")
        within = self.min_tokens <= self.max_tokens
        reason = f"must not exceed max_tokens, which is {self.max_tokens}"
        _check("min_tokens", self.min_tokens, within, reason)
        finite = math.isfinite(self.temperature) and 0 <= self.temperature <= 100
        _check("temperature", self.temperature, finite, "must lie between 0 and 100")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "must lie in [0, 1]")
        _check("top_k", self.top_k, self.top_k >= 0, "must be 0 (all) or positive")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "must lie in (0, 1]")
        _check("typical_p", self.typical_p, 0 < self.typical_p <= 1, "must lie in (0, 1]")
        _check("seed", self.seed, 0 <= self.seed < 2**64, "must fit in 64 bits, unsigned")
        _check("n", self.n, 1 <= self.n <= MAX_CHOICES, f"must lie between 1 and {MAX_CHOICES}")
        few = len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS
        reason = f"at most {MAX_STOP_TOKEN_IDS} ids"
        _check("stop_token_ids", len(self.stop_token_ids), few, reason)
        bounded = -1 <= self.num_logprobs <= MAX_TOP_LOGPROBS
        reason = f"must lie between 0 and {MAX_TOP_LOGPROBS}"
        _check("logprobs", self.num_logprobs, bounded, reason)
