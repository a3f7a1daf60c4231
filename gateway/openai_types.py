"""Bodies of OpenAI's API, strictly typed. What is not listed is refused: a typo changes meaning.

Fields of three kinds: served ones; harmless ones, accepted and ignored (_Ignored); and features
that are not served (_Unsupported), accepted only with the value that means "off".
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

# Longer ones of JSON have no use here, and Python prints none of more than 4300 digits.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


# Values of fields that are not served that mean "off"; None always does.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "ttft_ms": (),
    "itl_ms": (),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {**NEUTRAL, "best_of": (1,), "echo": (False,)}


class Body(msgspec.Struct, kw_only=True):
    """Of any request. `neutral`: the only values that some of its fields may have."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(msgspec.Struct):
    """A part of a message; only type "text" is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class _Ignored(Body, kw_only=True):
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class _Unsupported(_Ignored, kw_only=True):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    suffix: Any = None
    length_penalty: Any = None
    use_beam_search: Any = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    ttft_ms: Any = None
    itl_ms: Any = None


class LogitsProcessorField(msgspec.Struct, forbid_unknown_fields=True):
    """One that the operator registered, with arguments of its own."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class SamplingFields(_Unsupported, kw_only=True):
    """What chat and completions share; from `top_k` on vLLM's names for what OpenAI lacks."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None  # with or without a sign
    stop: str | list[str] | None = None
    max_tokens: Integer | None = None
    logit_bias: dict[Integer, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Integer | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: list[Integer] | None = None
    priority: Integer | None = None
    cache_salt: str | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Integer | None = None
    logits_processors: list[str | LogitsProcessorField] | None = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = CHAT_NEUTRAL

    best_of: Any = None
    echo: Any = None
    messages: list[ChatMessage]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | Integer | list[Integer]]
    logprobs: Integer | None = None
    echo: bool | None = None
    best_of: Integer | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Body, kw_only=True, forbid_unknown_fields=True):
    """A text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, kw_only=True, forbid_unknown_fields=True):
    tokens: list[Integer]
    model: str | None = None
