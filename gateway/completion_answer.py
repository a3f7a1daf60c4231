"""Completions on the wire: one frame a delta, the finish reason on the last."""

from typing import Any

import orjson

from paceline.gateway.answer import SSE_DONE, AnswerHead, frame_tail, timing, usage, usage_frame
from paceline.gateway.choice import Choice, Delta
from paceline.gateway.generation import Generation
from paceline.gateway.logprobs import CompletionLogprobs, TokenBytes
from paceline.gateway.prompt_logprobs import PromptLogprobsText

_OBJECT = "text_completion"


class CompletionAnswer:
    """See Answer. `token_bytes` and `prompts`, one for each prompt, are given when logprobs of
    either were asked for."""

    def __init__(
        self,
        head: AnswerHead,
        num_choices: int,
        token_bytes: TokenBytes | None,
        prompts: list[PromptLogprobsText],
        *,
        has_usage: bool,
        has_timing: bool,
    ) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._prompts = prompts
        self._num_choices = num_choices
        self._has_usage = has_usage
        self._has_timing = has_timing
        self._prefix = head.sse_prefix(_OBJECT)
        self._tail = frame_tail(has_usage=has_usage)
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._finish: list[str | None] = [None] * num_choices
        self._logprobs = [CompletionLogprobs(token_bytes or bytes) for _ in range(num_choices)]

    def frames(self, choice: Choice, delta: Delta) -> bytes:
        if not (delta.text or delta.logprobs or delta.finish or self._has_timing):
            return b""
        logprobs = b"null"
        if self._token_bytes is not None:
            entries = CompletionLogprobs(self._token_bytes)
            entries.add(delta)
            logprobs = orjson.dumps(entries.content())
        finish = b"null" if delta.finish is None else b'"%b"' % delta.finish.value.encode()
        return b"".join(
            (
                self._prefix,
                b',"choices":[{"index":%d,"text":' % choice.index,
                orjson.dumps(delta.text),
                b',"logprobs":',
                logprobs,
                b',"finish_reason":',
                finish,
                b"}]",
                timing(delta) if self._has_timing else b"",
                self._tail,
            )
        )

    def end(self, generation: Generation) -> bytes:
        last = usage_frame(self._prefix, generation) if self._has_usage else b""
        return last + SSE_DONE

    def collect(self, choice: Choice, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            if self._prompts:
                self._prompt_of(choice.index).add(delta.prompt_logprobs)
            return
        self._texts[choice.index].append(delta.text)
        if self._token_bytes is not None:
            self._logprobs[choice.index].add(delta)
        if delta.finish is not None:
            self._finish[choice.index] = delta.finish.value

    def whole(self, generation: Generation) -> bytes:
        choices = [self._whole_choice(index) for index in range(len(self._texts))]
        content = self._head.fields(_OBJECT)
        return orjson.dumps(content | {"choices": choices, "usage": usage(generation)})

    def _whole_choice(self, index: int) -> dict[str, Any]:
        has_logprobs = self._token_bytes is not None
        content = {
            "index": index,
            "text": "".join(self._texts[index]),
            "logprobs": self._logprobs[index].content() if has_logprobs else None,
            "finish_reason": self._finish[index],
        }
        if self._prompts:
            content["prompt_logprobs"] = self._prompt_of(index).content()
        return content

    def _prompt_of(self, index: int) -> PromptLogprobsText:
        """Each prompt has as many choices, one after the other."""
        return self._prompts[index * len(self._prompts) // self._num_choices]
