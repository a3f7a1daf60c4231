"""What a caller may say of a generation, and the message that it becomes."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from paceline.core.errors import InvalidRequest
from paceline.v1.common_pb2 import LogitsProcessor, TokenIds
from paceline.v1.generate_pb2 import GenerateRequest


class Options(TypedDict, total=False):
    """Names, defaults and bounds of docs/api.md; what is left out is left to the gateway."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    seed: int
    n: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int
    prompt_logprobs: int
    priority: int
    ttft_ms: float
    itl_ms: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    bad_token_ids: Sequence[Sequence[int]]
    logits_processors: Sequence[str | tuple[str, str]]  # a name, or it and a JSON object
    cache_salt: str
    statistics: bool


_FIELDS = {"logprobs": "num_logprobs", "prompt_logprobs": "num_prompt_logprobs"}


def request_of(prompt: str | Sequence[int], model: str, options: Options) -> GenerateRequest:
    """`prompt`: a text or token ids. Raises InvalidRequest for what the message cannot hold."""
    request = GenerateRequest(model=model)
    for name, value in (("prompt", prompt), *options.items()):
        if name != "prompt" and name not in Options.__annotations__:
            raise InvalidRequest(name, value, "is no option")
        try:
            request.MergeFrom(GenerateRequest(**_field(name, value)))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(name, value, str(error)) from None
    return request


def prompt_fields(value: Any) -> dict[str, Any]:
    """Of a message that takes a text or token ids. Raises TypeError or ValueError."""
    if value is None or isinstance(value, bytes | bytearray):  # else taken for token ids
        raise TypeError("must be text or token ids")
    return {"text": value} if isinstance(value, str) else {"tokens": TokenIds(ids=value)}


def _field(name: str, value: Any) -> dict[str, Any]:
    """Of the message, by its name there."""
    if name == "prompt":
        return prompt_fields(value)
    if name == "stop" and isinstance(value, str):
        return {"stop": [value]}
    if name == "bad_token_ids":
        return {name: [TokenIds(ids=ids) for ids in value]}
    if name == "logits_processors":
        return {name: [_processor(item) for item in value]}
    return {_FIELDS.get(name, name): value}


def _processor(item: str | tuple[str, str]) -> LogitsProcessor:
    name, arguments = (item, "") if isinstance(item, str) else item
    return LogitsProcessor(name=name, arguments=arguments)
