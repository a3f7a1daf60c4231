"""What a request asks for of single logits, checked and made ready when it comes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InvalidRequest
from paceline.core.sampling import SamplingParams
from paceline.engine.bad_words import BadWords
from paceline.engine.logits_processors import PreparedCall, ProcessorTable

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestEdits:
    """Constant while the request lives; what depends on its tokens is found at each step."""

    sampling: SamplingParams
    bias_ids: Int64s
    bias_values: NDArray[np.float32]
    bad_words: BadWords | None
    stop_ids: Int64s  # masked before min_tokens
    processors: tuple[PreparedCall, ...]

    def dead_end(self, output: Int64s) -> InvalidRequest | None:
        """The error when no token is left after `output`; None if nothing here masks any."""
        sampling, values = self.sampling, dict[str, object]()
        if self.processors:
            values["logits_processors"] = [call.name for call in self.processors]
        if self.bad_words is not None and len(self.bad_words.banned(output)):
            values["bad_words"] = f"{len(sampling.bad_words)} sequences"
        if len(self.stop_ids) and len(output) < sampling.min_tokens:
            values["min_tokens"] = sampling.min_tokens
        if not values:
            return None
        field, *others = values
        beside = f", beside {' and '.join(others)}" if others else ""
        reason = f"leaves no token to draw at position {len(output)} of the output{beside}"
        return InvalidRequest(field, values[field], reason)

    def masked_ids(self, output: Int64s) -> Int64s:
        """Ids that may not come after `output`."""
        ids = self.stop_ids[:0]
        if len(output) < self.sampling.min_tokens:
            ids = self.stop_ids
        if self.bad_words is not None:
            ids = np.concatenate((ids, self.bad_words.banned(output)))
        return ids


def request_edits(
    sampling: SamplingParams, stop_ids: tuple[int, ...], processors: ProcessorTable, vocab_size: int
) -> RequestEdits | None:
    """None if nothing is to be edited. Raises InvalidRequest."""
    sampling.check_ids(vocab_size)
    may_mask = bool(sampling.bad_words) or (sampling.min_tokens > 0 and bool(stop_ids))
    is_shifted = sampling.has_penalties or bool(sampling.logit_bias)
    if not (may_mask or is_shifted or sampling.logits_processors):
        return None
    return RequestEdits(
        sampling=sampling,
        bias_ids=np.array([token_id for token_id, _ in sampling.logit_bias], np.int64),
        bias_values=np.array([bias for _, bias in sampling.logit_bias], np.float32),
        bad_words=BadWords(sampling.bad_words) if sampling.bad_words else None,
        stop_ids=np.array([i for i in stop_ids if i < vocab_size], np.int64),
        processors=tuple(processors.prepare(call) for call in sampling.logits_processors),
    )
