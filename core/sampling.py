"""Sampling parameters of a request, checked once at the edge. Names and bounds are vLLM's."""

import json
import math
from dataclasses import dataclass

from paceline.core.errors import InvalidRequest

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_PENALTY = 2.0  # of presence and frequency
MAX_BAD_WORDS = 256
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS  # of tokens: a word by itself, and behind a space
MAX_BAD_WORD_TOKENS = 64  # of each
MAX_WORD_CHARS = 256  # of a bad word as a text
MAX_STOP_CHARS = 1024  # of a stop string
MAX_PROCESSORS = 8
MAX_ARGUMENT_CHARS = 8192
_check = InvalidRequest.check


@dataclass(frozen=True, slots=True)
class LogitsProcessorCall:
    """One that the operator registered, by its name: a request never brings code."""

    name: str
    arguments: str = "{}"  # a JSON object

    def __post_init__(self) -> None:
        field = "logits_processors"
        _check(field, self.name, 0 < len(self.name) <= 128, "a name has 1 to 128 characters")
        few = len(self.arguments) <= MAX_ARGUMENT_CHARS
        reason = f"at most {MAX_ARGUMENT_CHARS} characters of arguments"
        _check(field, len(self.arguments), few, reason)
        try:
            is_object = isinstance(json.loads(self.arguments), dict)
        except (ValueError, RecursionError):
            is_object = False
        _check(field, self.arguments, is_object, "arguments must be a JSON object")


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
    num_prompt_logprobs: int = -1  # the same for the tokens of the prompt
    repetition_penalty: float = 1.0  # of tokens in prompt or output
    presence_penalty: float = 0.0  # of tokens in the output
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not be completed
    logits_processors: tuple[LogitsProcessorCall, ...] = ()

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_distribution()
        self._check_edits()

    @property
    def has_penalties(self) -> bool:
        by_count = self.presence_penalty != 0 or self.frequency_penalty != 0
        return by_count or self.repetition_penalty != 1

    def _check_lengths(self) -> None:
        _check("max_tokens", self.max_tokens, self.max_tokens >= 1, "must be at least 1")
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, "must not be negative")
        within = self.min_tokens <= self.max_tokens
        reason = f"must not exceed max_tokens, which is {self.max_tokens}"
        _check("min_tokens", self.min_tokens, within, reason)
        few = len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS
        reason = f"at most {MAX_STOP_TOKEN_IDS} ids"
        _check("stop_token_ids", len(self.stop_token_ids), few, reason)
        reason = f"must lie between 0 and {MAX_TOP_LOGPROBS}"
        for field, value in (
            ("logprobs", self.num_logprobs),
            ("prompt_logprobs", self.num_prompt_logprobs),
        ):
            _check(field, value, -1 <= value <= MAX_TOP_LOGPROBS, reason)

    def _check_distribution(self) -> None:
        finite = math.isfinite(self.temperature) and 0 <= self.temperature <= 100
        _check("temperature", self.temperature, finite, "must lie between 0 and 100")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "must lie in [0, 1]")
        _check("top_k", self.top_k, self.top_k >= 0, "must be 0 (all) or positive")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "must lie in (0, 1]")
        _check("typical_p", self.typical_p, 0 < self.typical_p <= 1, "must lie in (0, 1]")
        _check("seed", self.seed, 0 <= self.seed < 2**64, "must fit in 64 bits, unsigned")
        _check("n", self.n, 1 <= self.n <= MAX_CHOICES, f"must lie between 1 and {MAX_CHOICES}")

    def _check_edits(self) -> None:
        penalty = self.repetition_penalty
        usable = math.isfinite(penalty) and 1e-6 <= penalty <= 1e6
        _check("repetition_penalty", penalty, usable, "must lie between 1e-6 and 1e6")
        reason = f"must lie in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]"
        for field, penalty in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            _check(field, penalty, -MAX_PENALTY <= penalty <= MAX_PENALTY, reason)
        self._check_bias()
        self._check_bad_words()
        few = len(self.logits_processors) <= MAX_PROCESSORS
        _check("logits_processors", len(self.logits_processors), few, f"at most {MAX_PROCESSORS}")

    def _check_bias(self) -> None:
        few = len(self.logit_bias) <= MAX_BIASES
        _check("logit_bias", f"{len(self.logit_bias)} ids", few, f"at most {MAX_BIASES} ids")
        ids = [token_id for token_id, _ in self.logit_bias]
        _check("logit_bias", ids, len(set(ids)) == len(ids), "names an id twice")
        reason = f"a bias must lie in [-{MAX_BIAS:g}, {MAX_BIAS:g}]"
        for _, bias in self.logit_bias:
            _check("logit_bias", bias, -MAX_BIAS <= bias <= MAX_BIAS, reason)

    def _check_bad_words(self) -> None:
        few = len(self.bad_words) <= MAX_BAD_SEQUENCES
        reason = f"at most {MAX_BAD_SEQUENCES} token sequences"
        _check("bad_words", f"{len(self.bad_words)} sequences", few, reason)
        reason = f"a bad word has 1 to {MAX_BAD_WORD_TOKENS} tokens"
        for word in self.bad_words:
            _check("bad_words", word, 0 < len(word) <= MAX_BAD_WORD_TOKENS, reason)

    def check_ids(self, vocab_size: int) -> None:
        """Raises InvalidRequest for a bias or a bad word outside of the vocabulary."""
        biased = ("logit_bias", [token_id for token_id, _ in self.logit_bias])
        bad = ("bad_words", [token_id for word in self.bad_words for token_id in word])
        for field, ids in (biased, bad):
            for token_id in ids:
                reason = f"ids must lie between 0 and {vocab_size - 1}"
                _check(field, token_id, 0 <= token_id < vocab_size, reason)
