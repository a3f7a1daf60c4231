"""One choice of a response: from emissions to text, until it stops."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.errors import Cancelled, EngineFailure
from paceline.core.finish import FinishReason
from paceline.gateway.detokenizer import Detokenizer
from paceline.gateway.stop_strings import StopAutomaton, StopMatcher
from paceline.rpc.convert import finish_from_proto
from paceline.v1.common_pb2 import Emission, PositionLogprobs, PromptLogprobs


@dataclass(slots=True)
class Delta:
    """What one emission adds to a choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)  # where each token's text begins
    logprobs: Sequence[PositionLogprobs] = ()
    finish: FinishReason | None = None
    emitted_unix_us: int = 0
    prompt_logprobs: PromptLogprobs | None = None  # a part; there is nothing else then


class Choice:
    """Works token by token, so that any grouping of tokens into emissions gives the same."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: Sequence[StopAutomaton],
        min_tokens: int,
        end_ids: frozenset[int],
        *,
        shows_stop: bool = False,
    ) -> None:
        self.index = index  # in the response
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self.last_emission_s = 0.0
        self._num_chars = 0
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, is_shown=shows_stop)
        self._shows_stop = shows_stop
        self._min_tokens = min_tokens
        self._end_ids = end_ids

    def push(self, emission: Emission) -> Delta:
        """Raises EngineFailure on a gap in positions, Cancelled if it was cancelled elsewhere."""
        if emission.position != self.num_tokens:
            raise EngineFailure(
                f"tokens were lost: position {emission.position} came, {self.num_tokens} was due"
            )
        finish = finish_from_proto(emission.finish) if emission.finish else None
        if finish is FinishReason.CANCELLED:
            raise Cancelled("the request was cancelled")
        delta = Delta(emitted_unix_us=emission.emitted_unix_us)
        num_left = len(emission.token_ids)
        for token_id in emission.token_ids:
            num_left -= 1
            self._push_token(token_id, delta, finish if num_left == 0 else None)
            if self._matcher.stopped:
                break
        if finish is not None and not self._matcher.stopped:
            delta.text += self._rest()
        if self._matcher.stopped:
            finish = FinishReason.STOP
        if emission.logprobs:
            delta.logprobs = emission.logprobs[: len(delta.token_ids)]
        delta.finish = self.finish = finish
        return delta

    def _push_token(self, token_id: int, delta: Delta, finish: FinishReason | None) -> None:
        self.num_tokens += 1
        delta.token_ids.append(token_id)
        delta.text_offsets.append(self._num_chars)
        if finish is FinishReason.STOP and token_id in self._end_ids and not self._shows_stop:
            return  # the token that ends a text is no part of it
        piece = self._detokenizer.push(token_id)
        self._num_chars += len(piece)
        may_stop = self.num_tokens > self._min_tokens
        delta.text += self._matcher.push(piece) if may_stop else piece

    def _rest(self) -> str:
        """What detokenizer and matcher still hold at the end."""
        shown = self._matcher.push(self._detokenizer.flush())
        return shown if self._matcher.stopped else shown + self._matcher.flush()
