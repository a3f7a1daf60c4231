"""What bodies of answers consist of: the OpenAPI document is made from these, and tests hold every
answer against them. Answers themselves are written piece by piece, in answer.py and its like."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

Finish = Literal["stop", "length"]


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """Fields with UNSET may be absent; all others are there, perhaps null."""


class ErrorInfo(Shape):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Shape):
    """Of every answer that is no success, and of the last frame of a stream that failed."""

    error: ErrorInfo


class PromptTokensDetails(Shape):
    cached_tokens: int


class Usage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingUsage(Shape):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingItem(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64 of float32, little-endian


class EmbeddingList(Shape):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class StatisticsFields(Shape):
    """Asked for by X-Paceline-Statistics."""

    prepare_ms: float
    queue_ms: float
    prefill_ms: float
    pull_ms: float
    decode_ms: float
    total_ms: float
    hit_tokens: int


class Extras(Shape):
    """What OpenAI lacks, asked for by headers: of a frame its timing, of an answer statistics."""

    emitted_unix_us: int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    statistics: StatisticsFields | UnsetType = UNSET


class PromptToken(Shape):
    logprob: float
    rank: int
    decoded_token: str


PromptTokens = list[dict[str, PromptToken] | None]  # by token id


class ChatToken(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenEntry(ChatToken):
    top_logprobs: list[ChatToken]


class ChatTokenEntries(Shape):
    content: list[ChatTokenEntry]
    refusal: None


class AnswerMessage(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: int
    message: AnswerMessage
    logprobs: ChatTokenEntries | None
    finish_reason: Finish


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptTokens | UnsetType = UNSET
    paceline: Extras | UnsetType = UNSET


class MessageDelta(Shape):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Shape):
    index: int
    delta: MessageDelta
    logprobs: ChatTokenEntries | None
    finish_reason: Finish | None


class ChatCompletionChunk(Shape):
    """The data of a frame of a stream; the last frame is `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    paceline: Extras | UnsetType = UNSET


class CompletionTokens(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChunkChoice(Shape):
    index: int
    text: str
    logprobs: CompletionTokens | None
    finish_reason: Finish | None


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionTokens | None
    finish_reason: Finish
    prompt_logprobs: PromptTokens | UnsetType = UNSET


class Completion(Shape):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    paceline: Extras | UnsetType = UNSET


class CompletionChunk(Shape):
    """The data of a frame of a stream; the last frame is `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    paceline: Extras | UnsetType = UNSET


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(Shape):
    prompt: str


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]
