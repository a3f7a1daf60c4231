"""Whether a request can be served here at all."""

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import ContextLengthExceeded, InvalidRequest
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.allowances import Allowances
from paceline.engine.logits_processors import ProcessorTable
from paceline.engine.messages import RequestSpec
from paceline.engine.pooling import PooledStates
from paceline.engine.request_edits import request_edits
from paceline.engine.sequence import Group, Sequence
from paceline.models.base import Model


class Admission:
    """Raises InvalidRequest (ContextLengthExceeded when too long), naming field and value."""

    def __init__(self, model: Model, allowances: Allowances) -> None:
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.context_length = model.context_length
        self.num_pages = allowances.num_pages
        self.num_page_groups = len(allowances.groups)
        self.max_length = allowances.max_length  # tokens of a sequence
        self._processors = ProcessorTable(model.vocab_size)

    def admit(self, slot: int, spec: RequestSpec, arrival: int, prefill_only: bool) -> Group:
        """The group of a valid request, with its leader."""
        tokens = self._checked_tokens(spec)
        sampling = spec.sampling
        eos = () if sampling.ignore_eos else self.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))
        group = Group(
            slot=slot,
            spec=spec,
            arrival=arrival,
            prefill_only=prefill_only,
            choices=list(spec.choices),
            stop_ids=stop_ids,
            max_length=self._max_length(spec, prefill_only),
            edits=request_edits(sampling, stop_ids, self._processors, self.vocab_size),
        )
        is_scored = sampling.num_prompt_logprobs >= 0 and len(tokens) == spec.num_prompt_tokens
        if spec.pooling is not None:
            group.pooled = PooledStates.of(spec.pooling, len(tokens))
        group.num_scored = 0 if is_scored else spec.num_prompt_tokens
        group.leader = Sequence(group, spec.choices[0], tokens, len(tokens), self.num_page_groups)
        group.sequences = [group.leader]
        return group

    def _max_length(self, spec: RequestSpec, prefill_only: bool) -> int:
        """Tokens of a choice at its end. A pool that cannot hold them is no reason for a short
        answer: the request is refused."""
        if spec.pooling is not None:
            return spec.num_prompt_tokens
        longest = min(self.context_length, spec.num_prompt_tokens + spec.sampling.max_tokens)
        if longest > self.max_length and not prefill_only:
            reason = (
                f"with {spec.num_prompt_tokens} prompt tokens that is more than the pool of "
                f"{self.max_length} tokens holds"
            )
            raise ContextLengthExceeded("max_tokens", spec.sampling.max_tokens, reason)
        return longest

    def _checked_tokens(self, spec: RequestSpec) -> NDArray[np.int64]:
        tokens = self._token_array(spec.token_ids)
        self._check_counts(spec, len(tokens))
        longest = self.max_length if spec.pooling is not None else self.max_length - 1
        if len(tokens) > longest:
            raise ContextLengthExceeded(
                "prompt",
                len(tokens),
                f"at most {longest} tokens fit: the context is {self.context_length}, the pool "
                f"holds {self.num_pages} pages of {PAGE_TOKENS}",
            )
        return tokens

    def _token_array(self, token_ids: list[int]) -> NDArray[np.int64]:
        if not token_ids:
            raise InvalidRequest("prompt", token_ids, "is empty")
        try:
            tokens = np.asarray(token_ids, np.int64)
        except OverflowError:
            tokens = np.asarray([-1], np.int64)
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise InvalidRequest("token_ids", wrong, f"the vocabulary has {self.vocab_size} ids")
        return tokens

    def _check_counts(self, spec: RequestSpec, num_tokens: int) -> None:
        if not 1 <= spec.num_prompt_tokens <= num_tokens:
            reason = f"must lie between 1 and the {num_tokens} tokens given"
            raise InvalidRequest("num_prompt_tokens", spec.num_prompt_tokens, reason)
        num_forced = num_tokens - spec.num_prompt_tokens
        reason = f"has no output, of which {num_forced} tokens are given"
        has_output = spec.pooling is None
        InvalidRequest.check("pooling", spec.pooling, has_output or not num_forced, reason)
        if num_forced >= spec.sampling.max_tokens:
            reason = f"{num_forced} tokens were emitted before: nothing is left to do"
            raise InvalidRequest("max_tokens", spec.sampling.max_tokens, reason)
        choices = spec.choices
        if not choices or len(set(choices)) < len(choices) or min(choices) < 0:
            raise InvalidRequest("choices", choices, "must be distinct and at least one")
