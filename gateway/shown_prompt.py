"""A prompt in the answer of a completion: its text before each choice, its log probabilities."""

from typing import Any

from paceline.gateway.detokenizer import Detokenizer
from paceline.gateway.logprobs import CompletionLogprobs
from paceline.gateway.prompt_logprobs import PromptLogprobsText
from paceline.v1.common_pb2 import PromptLogprobs


class Echo:
    """The text of a prompt, and its tokens in the form of the output's log probabilities."""

    def __init__(self, text: str, num_top: int) -> None:
        """`num_top`: of the best tokens, for each position."""
        self.text = text
        self._num_top = num_top
        self._num_chars = 0
        self._detokenizer: Detokenizer | None = None
        self._logprobs: CompletionLogprobs | None = None

    def begin(self, logprobs: CompletionLogprobs, detokenizer: Detokenizer, first: int) -> None:
        """Log probabilities were asked for. The first token of a prompt has none."""
        self._logprobs = logprobs
        self._detokenizer = detokenizer
        logprobs.add_unknown(first, self._offset_of(first))

    def add(self, part: PromptLogprobs) -> None:
        if self._logprobs is None:
            return
        offsets = [self._offset_of(position.chosen.token_id) for position in part.positions]
        self._logprobs.add_positions(part.positions, offsets, self._num_top)

    def copy_to(self, logprobs: CompletionLogprobs) -> None:
        if self._logprobs is not None:
            logprobs.extend(self._logprobs)

    def _offset_of(self, token_id: int) -> int:
        assert self._detokenizer is not None
        offset = self._num_chars
        self._num_chars += len(self._detokenizer.push(token_id))
        return offset


class ShownPrompt:
    """Both may be missing: `echo`, and `scores` in vLLM's form."""

    def __init__(self, echo: Echo | None, scores: PromptLogprobsText | None) -> None:
        self.echo = echo
        self._scores = scores

    def add(self, part: PromptLogprobs) -> None:
        if self.echo is not None:
            self.echo.add(part)
        if self._scores is not None:
            self._scores.add(part)

    @property
    def text(self) -> str:
        return "" if self.echo is None else self.echo.text

    def fields(self) -> dict[str, Any]:
        """What each choice has of it beside its text."""
        return {} if self._scores is None else {"prompt_logprobs": self._scores.content()}
