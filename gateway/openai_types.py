"""Bodies of OpenAI's API, strictly typed. What is not listed is refused: a typo changes meaning.

Fields of three kinds: served ones; harmless ones, accepted and ignored (_Ignored); and features
that are not served (_Unsupported), accepted only with the value that means "off".
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from paceline.core.sampling import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_PENALTY,
    MAX_PROCESSORS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    MAX_WORD_CHARS,
)
from paceline.core.targets import MAX_TARGET_MS
from paceline.gateway.tenants import MAX_CACHE_SALT_CHARS

SAYS = "says"


def says(**schema: Any) -> msgspec.Meta:
    """What the OpenAPI document tells of a field beside its type: such bounds are not the
    decoder's to check. msgspec keeps its own keywords, so openapi.py puts these in their place."""
    return msgspec.Meta(extra_json_schema={SAYS: schema})


# Longer ones of JSON have no use here, and Python prints none of more than 4300 digits.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_TOKEN_ID = {"type": "integer", "minimum": 0}
TokenId = Annotated[Integer, says(minimum=0)]
Count = Annotated[Integer, says(minimum=0, maximum=MAX_TOP_LOGPROBS)]  # of log probabilities
Penalty = Annotated[float, says(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)]
Share = Annotated[float, says(exclusiveMinimum=0, maximum=1)]  # of a distribution
Bias = Annotated[float, says(minimum=-MAX_BIAS, maximum=MAX_BIAS)]
StopText = Annotated[str, says(minLength=1, maxLength=MAX_STOP_CHARS)]
BadWord = Annotated[str, says(minLength=1, maxLength=MAX_WORD_CHARS)]
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
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {**NEUTRAL, "best_of": (1,), "echo": (False,)}


class Body(msgspec.Struct, kw_only=True):
    """Of any request. `neutral`: the only values that some of its fields may have."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


_PARTS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}


class ContentPart(msgspec.Struct):
    """A part of a message; only type "text" is served."""

    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct):
    """Of an assistant's message in the past; new ones are not made yet."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    role: Annotated[Role, says(enum=["system", "developer", "user", "assistant", "tool"])]
    content: Annotated[str | list[ContentPart] | None, says(anyOf=[{"type": "string"}, _PARTS])] = (
        None
    )
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
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


class LogitsProcessorField(msgspec.Struct, forbid_unknown_fields=True):
    """One that the operator registered, with arguments of its own."""

    name: str
    arguments: Annotated[msgspec.Raw, says(type="object")] = msgspec.field(
        default_factory=lambda: msgspec.Raw(b"{}")
    )


Priority = Annotated[Integer, says(minimum=-(2**31), maximum=2**31 - 1)]
CacheSalt = Annotated[str, says(minLength=1, maxLength=MAX_CACHE_SALT_CHARS)]
Target = Annotated[float, says(exclusiveMinimum=0, maximum=MAX_TARGET_MS)]  # milliseconds


class SamplingFields(_Unsupported, kw_only=True):
    """What chat and completions share; from `top_k` on vLLM's names for what OpenAI lacks."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Integer, says(minimum=1, maximum=MAX_CHOICES)] | None = None
    temperature: Annotated[float, says(minimum=0, maximum=100)] | None = None
    top_p: Share | None = None
    seed: Annotated[int, says(minimum=-(2**63), maximum=2**64 - 1)] | None = None
    stop: StopText | list[StopText] | None = None
    max_tokens: Annotated[Integer, says(minimum=0)] | None = None
    logit_bias: (
        Annotated[
            dict[Integer, Bias],
            says(maxProperties=MAX_BIASES, propertyNames={"pattern": "^(0|[1-9][0-9]*)$"}),
        ]
        | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    top_k: Annotated[Integer, says(minimum=-1)] | None = None
    min_tokens: Annotated[Integer, says(minimum=0)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stop_token_ids: Annotated[list[TokenId], says(maxItems=MAX_STOP_TOKEN_IDS)] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    ttft_ms: Target | None = None
    itl_ms: Target | None = None
    min_p: Annotated[float, says(minimum=0, maximum=1)] | None = None
    typical_p: Share | None = None
    repetition_penalty: Annotated[float, says(minimum=1e-6, maximum=1e6)] | None = None
    bad_words: Annotated[list[BadWord], says(maxItems=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: Count | None = None
    logits_processors: (
        Annotated[list[str | LogitsProcessorField], says(maxItems=MAX_PROCESSORS)] | None
    ) = None


class ChatRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Messages go through the model's chat template."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = CHAT_NEUTRAL

    best_of: Any = None
    echo: Any = None
    messages: Annotated[list[ChatMessage], says(minItems=1)]
    max_completion_tokens: Annotated[Integer, says(minimum=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None


Contents = Annotated[
    str | list[str | Integer | list[Integer]],
    says(
        anyOf=[
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
            {"type": "array", "minItems": 1, "items": _TOKEN_ID},
            {
                "type": "array",
                "minItems": 1,
                "items": {"type": "array", "minItems": 1, "items": _TOKEN_ID},
            },
        ]
    ),
]


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """A text, token ids, or several of either."""

    prompt: Contents
    logprobs: Count | None = None
    echo: bool | None = None
    best_of: Annotated[Integer, says(minimum=1, maximum=MAX_CHOICES)] | None = None
    add_special_tokens: bool | None = None


class EmbeddingRequest(_Ignored, kw_only=True, forbid_unknown_fields=True):
    """Inputs in the forms of prompts; from `pooling` on what OpenAI lacks."""

    model: str
    input: Contents
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Integer, says(minimum=1)] | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Body, kw_only=True, forbid_unknown_fields=True):
    """A text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], says(minItems=1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, kw_only=True, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None
