"""What every answer has: id, time, model, usage. Chat and completions fill in the rest."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from paceline.gateway.choice import Choice, Delta
from paceline.gateway.generation import Generation
from paceline.gateway.statistics import json_fields

SSE_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Made once a request; `kind` is the prefix of OpenAI's ids."""

    kind: str
    model: str
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, object_name: str) -> dict[str, Any]:
        return {
            "id": f"{self.kind}-{self.id}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
        }

    def sse_prefix(self, object_name: str) -> bytes:
        """`data: {…` up to the choices: encoded once, the same in every frame."""
        return b"data: " + orjson.dumps(self.fields(object_name))[:-1]


class Answer(Protocol):
    """Turns the deltas of one response into bytes; one object a response."""

    def frames(self, choice: Choice, delta: Delta) -> bytes:
        """SSE frames for one delta; empty when there is nothing to show yet."""
        ...

    def end(self, generation: Generation) -> bytes:
        """The last SSE frames: usage if asked for, then [DONE]."""
        ...

    def collect(self, choice: Choice, delta: Delta) -> None:
        """Keeps one delta for an answer in one piece."""
        ...

    def whole(self, generation: Generation) -> bytes:
        """The answer in one piece."""
        ...


def usage(generation: Generation, *, has_output: bool = True) -> dict[str, Any]:
    prompt = generation.num_prompt_tokens
    output = generation.num_output_tokens if has_output else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


def last_frames(
    prefix: bytes, generation: Generation, *, has_usage: bool, has_output: bool = True
) -> bytes:
    """A frame of usage and statistics, if either was asked for, then [DONE]."""
    fields: dict[str, Any] = {"usage": usage(generation, has_output=has_output)}
    if not has_usage:
        fields.clear()
    fields |= statistics_fields(generation)
    if not fields:
        return SSE_DONE
    return prefix + b',"choices":[],' + orjson.dumps(fields)[1:] + b"\n\n" + SSE_DONE


def statistics_fields(generation: Generation) -> dict[str, Any]:
    """{paceline: {statistics}}, if they were asked for."""
    statistics = generation.statistics
    return {} if statistics is None else {"paceline": {"statistics": json_fields(statistics)}}


def frame_tail(*, has_usage: bool) -> bytes:
    """End of every frame but the last: with usage asked for, it is null until then."""
    return b',"usage":null}\n\n' if has_usage else b"}\n\n"


def timing(delta: Delta) -> bytes:
    """When the engine emitted which tokens: asked for by x-paceline-timing, for measurement."""
    token_ids = orjson.dumps(delta.token_ids)
    return b',"paceline":{"emitted_unix_us":%d,"token_ids":%b}' % (delta.emitted_unix_us, token_ids)
