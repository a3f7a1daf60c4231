"""One Embed call, from its message to that of its answer, whoever brings it."""

from paceline.core.errors import InvalidRequest
from paceline.core.pooling import Pooling
from paceline.gateway.contents import Content, check_count
from paceline.gateway.deadline import Deadline
from paceline.gateway.embeddings import FIELD, OPERATION, EmbeddingWishes, embeddings
from paceline.gateway.request_log import Origin
from paceline.gateway.serving import Serving
from paceline.gateway.tenants import Tenant
from paceline.rpc.convert import pooling_from_proto
from paceline.v1.generate_pb2 import Embedding, EmbedInput, EmbedRequest, EmbedResponse

_UNTRACED = Origin(OPERATION)


async def embed(
    serving: Serving,
    request: EmbedRequest,
    tenant: Tenant,
    deadline: Deadline,
    origin: Origin = _UNTRACED,
) -> EmbedResponse:
    """Raises PacelineError. When it is cancelled, all ends upstream."""
    async with deadline.kept():
        model = serving.model_or_only(request.model)
        wishes = _wishes(request, serving.config.limits.max_embedding_inputs)
        found = await embeddings(serving, model, wishes, tenant, deadline, origin)

        def message() -> EmbedResponse:
            return EmbedResponse(
                embeddings=[Embedding(values=vector) for vector in found.vectors],
                num_prompt_tokens=found.num_prompt_tokens,
                num_cached_tokens=found.num_cached_tokens,
            )

        num_numbers = sum(len(vector) for vector in found.vectors)
        return await serving.prompts.work(message, num_numbers)


def _wishes(request: EmbedRequest, max_inputs: int) -> EmbeddingWishes:
    def given(name: str) -> bool:
        return request.HasField(name)

    InvalidRequest.check("inputs", [], bool(request.inputs), "must not be empty")
    check_count(FIELD, len(request.inputs), max_inputs)
    return EmbeddingWishes(
        contents=[_content(one) for one in request.inputs],
        pooling=pooling_from_proto(request.pooling) if request.pooling else Pooling.LAST,
        dimensions=request.dimensions if given("dimensions") else None,
        normalize=request.normalize if given("normalize") else None,
        priority=request.priority,
        cache_salt=request.cache_salt if given("cache_salt") else None,
    )


def _content(one: EmbedInput) -> Content:
    return list(one.tokens.ids) if one.WhichOneof("input") == "tokens" else one.text
