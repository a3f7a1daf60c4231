"""What a caller may say of embeddings, the message that it becomes, and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from paceline.client.options import prompt_fields
from paceline.core.errors import InvalidRequest
from paceline.v1.common_pb2 import Pooling
from paceline.v1.generate_pb2 import EmbedInput, EmbedRequest, EmbedResponse


class EmbedOptions(TypedDict, total=False):
    """Names, defaults and bounds of docs/api.md; what is left out is left to the gateway."""

    pooling: Literal["last", "mean"]
    normalize: bool
    dimensions: int
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class Embeddings:
    """`vectors`: one an input, in order."""

    vectors: list[list[float]]
    num_prompt_tokens: int
    num_cached_tokens: int


def embed_request_of(
    inputs: Sequence[str | Sequence[int]], model: str, options: EmbedOptions
) -> EmbedRequest:
    """`inputs`: texts or lists of token ids. Raises InvalidRequest for what the message cannot
    hold."""
    is_list = isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes)
    InvalidRequest.check("inputs", inputs, is_list, "must be a list")
    request = EmbedRequest(model=model)
    for one in inputs:
        try:
            request.inputs.append(EmbedInput(**prompt_fields(one)))
        except (TypeError, ValueError) as error:
            raise InvalidRequest("inputs", one, str(error)) from None
    for name, value in options.items():
        InvalidRequest.check(name, value, name in EmbedOptions.__annotations__, "is no option")
        try:
            request.MergeFrom(EmbedRequest(**{name: _value(name, value)}))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(name, value, str(error)) from None
    return request


def embeddings_of(response: EmbedResponse) -> Embeddings:
    return Embeddings(
        vectors=[list(embedding.values) for embedding in response.embeddings],
        num_prompt_tokens=response.num_prompt_tokens,
        num_cached_tokens=response.num_cached_tokens,
    )


def _value(name: str, value: Any) -> Any:
    """As the message has it."""
    return Pooling.Value(f"POOLING_{str(value).upper()}") if name == "pooling" else value
