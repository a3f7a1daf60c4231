"""Chat completions on the wire: frames whose unchanging bytes are encoded once."""

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
from paceline.gateway.logprobs import ChatLogprobs, TokenBytes
from paceline.gateway.prompt_logprobs import PromptLogprobsText

_CHUNK = "chat.completion.chunk"


class ChatAnswer:
    """See Answer. `token_bytes` and `prompt` are given when logprobs of either were asked for."""

    def __init__(
        self,
        head: AnswerHead,
        num_choices: int,
        token_bytes: TokenBytes | None,
        prompt: PromptLogprobsText | None,
        *,
        has_usage: bool,
        has_timing: bool,
    ) -> None:
        self._head = head
        self._token_bytes = token_bytes
        self._prompt = prompt
        self._has_usage = has_usage
        self._has_timing = has_timing
        self._prefix = head.sse_prefix(_CHUNK)
        self._tail = frame_tail(has_usage=has_usage)
        self._starts = [
            self._prefix + b',"choices":[{"index":%d,"delta":{' % i for i in range(num_choices)
        ]
        self._begun = [False] * num_choices
        self._texts: list[list[str]] = [[] for _ in range(num_choices)]
        self._logprobs = [ChatLogprobs(token_bytes or bytes) for _ in range(num_choices)]
        self._finish: list[str | None] = [None] * num_choices

    def frames(self, choice: Choice, delta: Delta) -> bytes:
        out = b"" if self._begun[choice.index] else self._role_frame(choice.index)
        if delta.text or delta.logprobs or self._has_timing:
            out += self._content_frame(choice.index, delta)
        if delta.finish is not None:
            reason = delta.finish.value.encode()
            start = self._starts[choice.index]
            out += start + b'},"logprobs":null,"finish_reason":"' + reason + b'"}]' + self._tail
        return out

    def end(self, generation: Generation) -> bytes:
        return last_frames(self._prefix, generation, has_usage=self._has_usage)

    def collect(self, choice: Choice, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            if self._prompt is not None:
                self._prompt.add(delta.prompt_logprobs)
            return
        self._texts[choice.index].append(delta.text)
        if self._token_bytes is not None:
            self._logprobs[choice.index].add(delta)
        if delta.finish is not None:
            self._finish[choice.index] = delta.finish.value

    def whole(self, generation: Generation) -> bytes:
        choices = [self._whole_choice(index) for index in range(len(self._texts))]
        content = self._head.fields("chat.completion")
        content |= {"choices": choices, "usage": usage(generation)}
        if self._prompt is not None:
            content["prompt_logprobs"] = self._prompt.content()
        return orjson.dumps(content | statistics_fields(generation))

    def _whole_choice(self, index: int) -> dict[str, Any]:
        text = "".join(self._texts[index])
        has_logprobs = self._token_bytes is not None
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs[index].content() if has_logprobs else None,
            "finish_reason": self._finish[index],
        }

    def _role_frame(self, index: int) -> bytes:
        """Goes out with the first content, in one write."""
        self._begun[index] = True
        middle = b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._starts[index] + middle + self._tail

    def _content_frame(self, index: int, delta: Delta) -> bytes:
        logprobs = b"null"
        if self._token_bytes is not None:
            entries = ChatLogprobs(self._token_bytes)
            entries.add(delta)
            logprobs = orjson.dumps(entries.content())
        return b"".join(
            (
                self._starts[index],
                b'"content":',
                orjson.dumps(delta.text),
                b'},"logprobs":',
                logprobs,
                b',"finish_reason":null}]',
                timing(delta) if self._has_timing else b"",
                self._tail,
            )
        )
