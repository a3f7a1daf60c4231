"""What comes back: parts of a stream, and the whole of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.finish import FinishReason
from paceline.v1 import common_pb2
from paceline.v1.common_pb2 import PositionLogprobs
from paceline.v1.generate_pb2 import GenerateResponse, Statistics

_FINISH = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Part:
    """Of one choice. `text` never splits a code point and is empty while a stop string may form."""

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs]  # one a token, if they were asked for
    finish: FinishReason | None  # on the last part of the choice
    prompt_logprobs: Sequence[PositionLogprobs]  # there is nothing else then
    statistics: Statistics | None  # on the last part of all, if they were asked for


def part_of(response: GenerateResponse) -> Part:
    return Part(
        choice=response.choice,
        text=response.text,
        token_ids=list(response.token_ids),
        logprobs=list(response.logprobs),
        finish=_FINISH.get(response.finish),
        prompt_logprobs=list(response.prompt_logprobs.positions),
        statistics=response.statistics if response.HasField("statistics") else None,
    )


@dataclass(slots=True)
class Choice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass(slots=True)
class Result:
    """`choices` by index. `prompt_logprobs` are those of the prompt's tokens after the first."""

    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    statistics: Statistics | None = None

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


class Collector:
    """Joins responses to a result."""

    def __init__(self) -> None:
        self.result = Result()
        self._texts: list[list[str]] = []

    def add(self, response: GenerateResponse) -> None:
        part, result = part_of(response), self.result
        result.num_prompt_tokens = response.num_prompt_tokens
        result.num_cached_tokens = max(result.num_cached_tokens, response.num_cached_tokens)
        result.statistics = part.statistics or result.statistics
        if part.prompt_logprobs:
            result.prompt_logprobs.extend(part.prompt_logprobs)
            return
        while len(result.choices) <= part.choice:
            result.choices.append(Choice())
            self._texts.append([])
        choice = result.choices[part.choice]
        self._texts[part.choice].append(part.text)
        choice.token_ids.extend(part.token_ids)
        choice.logprobs.extend(part.logprobs)
        choice.finish = part.finish or choice.finish

    def finished(self) -> Result:
        for choice, texts in zip(self.result.choices, self._texts, strict=True):
            choice.text = "".join(texts)
        return self.result
