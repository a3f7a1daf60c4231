"""The public gRPC service: the same checks, the same work, messages instead of JSON and SSE."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc

from paceline.core.errors import ErrorCode, PacelineError
from paceline.gateway.deadline import Deadline
from paceline.gateway.embed_call import embed
from paceline.gateway.embeddings import OPERATION
from paceline.gateway.generate_call import responses
from paceline.gateway.request_log import Origin
from paceline.gateway.serving import Serving
from paceline.gateway.tenants import Tenant
from paceline.v1.generate_pb2 import (
    EmbedRequest,
    EmbedResponse,
    GenerateRequest,
    GenerateResponse,
)
from paceline.v1.generate_pb2_grpc import GenerateServiceServicer

_Context = grpc.aio.ServicerContext[Any, Any]


class GenerateService(GenerateServiceServicer):
    """A call that the client cancels is cancelled here by gRPC, and upstream by `close`.

    Its server's edge has `known` around a call, and `admitted` from when its message is here."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @contextmanager
    def known(self, context: _Context) -> Iterator[None]:
        """Lets in who has a key. Raises InvalidApiKey."""
        try:
            self._tenant(context)
            yield
        except Exception as failure:  # to be counted; what becomes of it is said in rpc/edge.py
            code = failure.code if isinstance(failure, PacelineError) else ErrorCode.INTERNAL
            self._serving.metrics.errors.labels(code.value).inc()
            raise

    @contextmanager
    def admitted(self, context: _Context) -> Iterator[None]:
        with self._serving.admitted(self._tenant(context)):
            yield

    async def Generate(
        self, request: GenerateRequest, context: _Context
    ) -> AsyncIterator[GenerateResponse]:
        deadline, tenant = self._deadline(context), self._tenant(context)
        origin = Origin(traceparent=_metadata(context, "traceparent").decode("latin-1"))
        async with aclosing(responses(self._serving, request, tenant, deadline, origin)) as found:
            async for response in found:
                yield response

    async def Embed(self, request: EmbedRequest, context: _Context) -> EmbedResponse:
        deadline, tenant = self._deadline(context), self._tenant(context)
        origin = Origin(OPERATION, _metadata(context, "traceparent").decode("latin-1"))
        return await embed(self._serving, request, tenant, deadline, origin)

    def _tenant(self, context: _Context) -> Tenant:
        return self._serving.authentication.tenant_of(_metadata(context, "authorization") or None)

    def _deadline(self, context: _Context) -> Deadline:
        """The call's own, within the gateway's."""
        remaining_s = context.time_remaining()
        limit_s = self._serving.config.limits.request_timeout_s
        return Deadline(limit_s if remaining_s is None else min(limit_s, remaining_s))


def _metadata(context: _Context, name: str) -> bytes:
    """Of a call; empty: none."""
    given: Any = dict(context.invocation_metadata() or ()).get(name, b"")
    return given.encode() if isinstance(given, str) else bytes(given)
