"""Completions on the wire: one frame a delta, the finish reason on the last."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from paceline.gateway.answer import (
    AnswerHead,
    frame_tail,
    last_frames,
    statistics_fields,
    timing,
    usage,
)
from paceline.gateway.choice import Choice, Delta
from paceline.gateway.generation import Generation
from paceline.gateway.logprobs import CompletionLogprobs, TokenBytes
from paceline.gateway.shown_prompt import ShownPrompt

_OBJECT = "text_completion"


@dataclass(frozen=True, slots=True)
class CompletionView:
    """What an answer shows beside the text of its choices."""

    num_choices: int  # of each prompt
    num_best: int  # of them, that are shown
    has_output: bool  # False: only the prompts
    has_usage: bool
    has_timing: bool


class CollectedChoice:
    """A choice of an answer in one piece."""

    def __init__(self, prompt: ShownPrompt, token_bytes: TokenBytes | None) -> None:
        self._prompt = prompt
        self._texts = [prompt.text]
        self._finish: str | None = None
        self._output = None if token_bytes is None else CompletionLogprobs(token_bytes)
        self._token_bytes = token_bytes
        self._sum = 0.0
        self._num_tokens = 0

    def add(self, delta: Delta, *, has_output: bool) -> None:
        if delta.finish is not None:
            self._finish = delta.finish.value
        if not has_output:
            self._finish = self._finish and "length"
            return
        self._texts.append(delta.text)
        self._sum += math.fsum(position.chosen.logprob for position in delta.logprobs)
        self._num_tokens += len(delta.logprobs)
        if self._output is not None:
            self._output.add(delta, len(self._prompt.text))

    @property
    def score(self) -> float:
        """Log probability a token."""
        return self._sum / self._num_tokens if self._num_tokens else -math.inf

    def content(self, index: int) -> dict[str, Any]:
        logprobs = None
        if self._output is not None and self._token_bytes is not None:
            logprobs = CompletionLogprobs(self._token_bytes)
            if self._prompt.echo is not None:
                self._prompt.echo.copy_to(logprobs)
            logprobs.extend(self._output)
        fields = {
            "index": index,
            "text": "".join(self._texts),
            "logprobs": logprobs.content() if logprobs is not None else None,
            "finish_reason": self._finish,
        }
        return fields | self._prompt.fields()


class CompletionAnswer:
    """See Answer. `token_bytes` is given when log probabilities were asked for."""

    def __init__(
        self,
        head: AnswerHead,
        prompts: Sequence[ShownPrompt],
        token_bytes: TokenBytes | None,
        view: CompletionView,
    ) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._prompts = prompts
        self._view = view
        self._prefix = head.sse_prefix(_OBJECT)
        self._tail = frame_tail(has_usage=view.has_usage)
        num_choices = len(prompts) * view.num_choices
        self._is_echoed = [
            prompt.echo is None for prompt in prompts for _ in range(view.num_choices)
        ]
        self._collected = [
            CollectedChoice(self._prompt_of(index), token_bytes) for index in range(num_choices)
        ]

    def frames(self, choice: Choice, delta: Delta) -> bytes:
        if delta.prompt_logprobs is not None:
            self._prompt_of(choice.index).add(delta.prompt_logprobs)
            return b""
        echo = b"" if self._is_echoed[choice.index] else self._echo_frame(choice.index)
        if not self._view.has_output:
            delta = Delta(finish=delta.finish)
        if not (delta.text or delta.logprobs or delta.finish or self._view.has_timing):
            return echo
        logprobs = b"null"
        if self._token_bytes is not None and delta.token_ids:
            entries = CompletionLogprobs(self._token_bytes)
            entries.add(delta, len(self._prompt_of(choice.index).text))
            logprobs = orjson.dumps(entries.content())
        finish = b"null" if delta.finish is None else b'"%b"' % self._finish_of(delta)
        shown = timing(delta) if self._view.has_timing else b""
        return echo + self._frame(choice.index, delta.text, logprobs, finish, shown)

    def end(self, generation: Generation) -> bytes:
        has_usage, has_output = self._view.has_usage, self._view.has_output
        return last_frames(self._prefix, generation, has_usage=has_usage, has_output=has_output)

    def collect(self, choice: Choice, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self._prompt_of(choice.index).add(delta.prompt_logprobs)
        else:
            self._collected[choice.index].add(delta, has_output=self._view.has_output)

    def whole(self, generation: Generation) -> bytes:
        choices = [chosen.content(index) for index, chosen in enumerate(self._best())]
        content = self._head.fields(_OBJECT)
        counted = usage(generation, has_output=self._view.has_output)
        content |= {"choices": choices, "usage": counted}
        return orjson.dumps(content | statistics_fields(generation))

    def _best(self) -> list[CollectedChoice]:
        """Of each prompt, the best first if not all are shown."""
        step, num_best = self._view.num_choices, self._view.num_best
        if num_best == step:
            return self._collected
        best: list[CollectedChoice] = []
        for start in range(0, len(self._collected), step):
            own = self._collected[start : start + step]
            best += sorted(own, key=lambda choice: choice.score, reverse=True)[:num_best]
        return best

    def _prompt_of(self, index: int) -> ShownPrompt:
        """Each prompt has as many choices, one after the other."""
        return self._prompts[index // self._view.num_choices]

    def _finish_of(self, delta: Delta) -> bytes:
        assert delta.finish is not None
        return delta.finish.value.encode() if self._view.has_output else b"length"

    def _echo_frame(self, index: int) -> bytes:
        """The prompt, in one frame before what follows it."""
        self._is_echoed[index] = True
        echo = self._prompt_of(index).echo
        assert echo is not None
        logprobs = b"null"
        if self._token_bytes is not None:
            entries = CompletionLogprobs(self._token_bytes)
            echo.copy_to(entries)
            logprobs = orjson.dumps(entries.content())
        return self._frame(index, echo.text, logprobs, b"null", b"")

    def _frame(self, index: int, text: str, logprobs: bytes, finish: bytes, shown: bytes) -> bytes:
        return b"".join(
            (
                self._prefix,
                b',"choices":[{"index":%d,"text":' % index,
                orjson.dumps(text),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                finish,
                b"}]",
                shown,
                self._tail,
            )
        )
