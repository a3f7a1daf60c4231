"""POST /v1/embeddings, and what gRPC's Embed shares with it: inputs to vectors."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import orjson

from paceline.core.errors import InvalidRequest
from paceline.core.pooling import Pooling
from paceline.gateway.contents import Content, contents_of
from paceline.gateway.context_room import InputRoom
from paceline.gateway.deadline import Deadline
from paceline.gateway.jobs import EmbeddingJob, Urgency
from paceline.gateway.openai_types import EmbeddingRequest
from paceline.gateway.request_log import Origin
from paceline.gateway.serving import Serving
from paceline.gateway.tenants import Tenant
from paceline.gateway.vectors import Vector, to_base64, vector_form
from paceline.v1.control_pb2 import ModelInfo

DECODER = msgspec.json.Decoder(EmbeddingRequest)
FIELD = "input"  # at fault when an input is
OPERATION = "embeddings"  # as OpenTelemetry names it


@dataclass(frozen=True, slots=True)
class EmbeddingWishes:
    """What a caller asks for; None is the default."""

    contents: Sequence[Content]
    pooling: Pooling = Pooling.LAST
    dimensions: int | None = None
    normalize: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    adds_special: bool = True


@dataclass(frozen=True, slots=True)
class Embeddings:
    vectors: list[Vector]
    num_prompt_tokens: int
    num_cached_tokens: int


async def embeddings(
    serving: Serving,
    model: ModelInfo,
    wishes: EmbeddingWishes,
    tenant: Tenant,
    deadline: Deadline,
    origin: Origin,
) -> Embeddings:
    """Raises PacelineError. When it is cancelled, all ends upstream."""
    form = vector_form(wishes.dimensions, model.hidden_size, wishes.normalize)
    limit = serving.config.limits.max_embedding_numbers
    _check_size(len(wishes.contents), form.num_dimensions, limit)
    urgency = Urgency(tenant.priority_of(wishes.priority), weight=tenant.weight)
    owner = tenant.owner(wishes.cache_salt)
    prompts = await serving.prompts.of_contents(
        wishes.contents,
        model,
        InputRoom(model.context_length, FIELD),
        owner.salt,
        adds_special=wishes.adds_special,
    )
    jobs = [EmbeddingJob(model, owner, prompt, wishes.pooling, urgency) for prompt in prompts]
    with serving.embedding(model, tenant, deadline, origin) as run:
        vectors = await run.vectors(jobs, form)
        return Embeddings(vectors, run.record.num_prompt_tokens, run.record.num_cached_tokens)


async def answer(
    serving: Serving, request: EmbeddingRequest, tenant: Tenant, deadline: Deadline, origin: Origin
) -> bytes:
    """OpenAI's JSON. Raises PacelineError."""
    model = serving.model(request.model)
    wishes = EmbeddingWishes(
        contents=contents_of(FIELD, request.input, serving.config.limits.max_embedding_inputs),
        pooling=Pooling(request.pooling or Pooling.LAST),
        dimensions=request.dimensions,
        normalize=request.normalize,
        priority=request.priority,
        cache_salt=request.cache_salt,
        adds_special=request.add_special_tokens is not False,
    )
    found = await embeddings(serving, model, wishes, tenant, deadline, origin)
    is_base64 = request.encoding_format == "base64"

    def body() -> bytes:
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": to_base64(vector) if is_base64 else vector,
            }
            for index, vector in enumerate(found.vectors)
        ]
        content = {"object": "list", "data": data, "model": model.name, "usage": _usage(found)}
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)

    num_numbers = sum(len(vector) for vector in found.vectors)
    return await serving.prompts.work(body, num_numbers)


def _usage(found: Embeddings) -> dict[str, object]:
    return {
        "prompt_tokens": found.num_prompt_tokens,
        "total_tokens": found.num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": found.num_cached_tokens},
    }


def _check_size(num_inputs: int, num_dimensions: int, most: int) -> None:
    reason = (
        f"with {num_dimensions} dimensions each that is {num_inputs * num_dimensions} numbers in an"
        f" answer; at most {most}"
    )
    fits = num_inputs * num_dimensions <= most
    InvalidRequest.check(FIELD, f"{num_inputs} inputs", fits, reason)
