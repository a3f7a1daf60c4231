"""POST endpoints as plain ASGI apps: body in, answer or stream out."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from paceline.core.errors import EngineFailure, PacelineError
from paceline.gateway import embeddings
from paceline.gateway.deadline import Deadline
from paceline.gateway.exchange import Exchange
from paceline.gateway.openai_types import Body, EmbeddingRequest, SamplingFields
from paceline.gateway.prepared import Caller, PreparedRequest
from paceline.gateway.request_log import Origin
from paceline.gateway.serving import Serving

S_contra = TypeVar("S_contra", bound=SamplingFields, contravariant=True)
S = TypeVar("S", bound=SamplingFields)
B_contra = TypeVar("B_contra", bound=Body, contravariant=True)
B = TypeVar("B", bound=Body)

logger = structlog.stdlib.get_logger("paceline.gateway")


class Prepare(Protocol[S_contra]):
    """What an API that generates does with a decoded body."""

    def __call__(
        self, serving: Serving, request: S_contra, caller: Caller
    ) -> Awaitable[PreparedRequest]: ...


class Respond(Protocol[B_contra]):
    """A body to the JSON of the answer."""

    def __call__(self, serving: Serving, request: B_contra) -> Awaitable[bytes]: ...


class Endpoint(ABC, Generic[B]):
    """An instance, not a function: Starlette then passes scope, receive and send through."""

    def __init__(self, serving: Serving, decoder: "msgspec.json.Decoder[B]") -> None:
        self._serving = serving
        self._decoder = decoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = Deadline(self._serving.config.limits.request_timeout_s)
        exchange = Exchange(self._serving, scope, receive, send, deadline)
        try:
            with self._serving.admitted(exchange.tenant):
                await self._answer(exchange, await exchange.read(self._decoder))
        except PacelineError as error:
            await exchange.fail(error)
        except Exception:  # the edge of the process: the caller gets no traceback
            logger.exception("request failed", tenant=exchange.tenant.digest)
            await exchange.fail(EngineFailure("internal error"))

    @abstractmethod
    async def _answer(self, exchange: Exchange, request: B) -> None: ...


class GeneratingEndpoint(Endpoint[S]):
    def __init__(
        self,
        serving: Serving,
        decoder: "msgspec.json.Decoder[S]",
        prepare: "Prepare[S]",
        operation: str,
    ) -> None:
        super().__init__(serving, decoder)
        self._prepare = prepare
        self._operation = operation

    async def _answer(self, exchange: Exchange, request: S) -> None:
        has_timing = exchange.header(b"x-paceline-timing") is not None
        has_statistics = exchange.header(b"x-paceline-statistics") is not None
        origin = Origin(self._operation, exchange.traceparent)
        caller = Caller(exchange.tenant, origin, has_timing, has_statistics)
        await exchange.run(self._prepare(self._serving, request, caller), exchange.generate)


class JsonEndpoint(Endpoint[B]):
    def __init__(
        self, serving: Serving, decoder: "msgspec.json.Decoder[B]", respond: "Respond[B]"
    ) -> None:
        super().__init__(serving, decoder)
        self._respond = respond

    async def _answer(self, exchange: Exchange, request: B) -> None:
        await exchange.run(self._respond(self._serving, request), exchange.reply)


class EmbeddingEndpoint(Endpoint[EmbeddingRequest]):
    async def _answer(self, exchange: Exchange, request: EmbeddingRequest) -> None:
        work = embeddings.answer(
            self._serving,
            request,
            exchange.tenant,
            exchange.deadline,
            Origin(embeddings.OPERATION, exchange.traceparent),
        )
        await exchange.run(work, exchange.reply)
