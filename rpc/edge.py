"""What stands before every servicer: asks for the caller's token, reads messages, answers errors.

A servicer raises what is wrong; here, and only here, it becomes a gRPC status (rpc/status.py).
Messages are parsed here, too: gRPC itself answers UNKNOWN to one that does not parse. A servicer
gets them as its argument; `context.read()` would give bytes. Services that are not ours (health,
reflection) ask for no token.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from paceline.core.errors import EngineFailure, IncompatiblePeer, InvalidRequest, PacelineError
from paceline.rpc import caller_token
from paceline.rpc.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler, whose attributes are not in its types
Method = Callable[[Any, Context], Any]
Parse = Callable[[bytes], Any]

_OURS = "/paceline."
_log = structlog.get_logger("paceline.rpc")


class Edge(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """`secret`: callers must know it; None for a public API."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        method = getattr(handler, kind)
        parsed = _parsing(method, handler.request_deserializer, handler.request_streaming)
        secret = self._secret if handler_call_details.method.startswith(_OURS) else None
        edged = _generator if inspect.isasyncgenfunction(method) else _coroutine
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            edged(parsed, secret), None, handler.response_serializer
        )


def _coroutine(method: Method, secret: bytes | None) -> Method:
    async def edged(request: Any, context: Context) -> Any:
        await _admit(context, secret)
        try:
            return await method(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as failure:
            await abort(context, _as_ours(failure))

    return edged


def _generator(method: Method, secret: bytes | None) -> Method:
    async def edged(request: Any, context: Context) -> AsyncIterator[Any]:
        await _admit(context, secret)
        try:
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as failure:
            await abort(context, _as_ours(failure))

    return edged


async def _admit(context: Context, secret: bytes | None) -> None:
    if secret is None:
        return
    try:
        caller_token.check(context.invocation_metadata() or (), secret)
    except IncompatiblePeer as error:
        await abort(context, error, grpc.StatusCode.UNAUTHENTICATED)


def _parsing(method: Method, parse: Parse, is_stream: bool) -> Method:
    """`method` for raw requests. Raises InvalidRequest, in the call or in its stream."""
    if is_stream:
        return lambda raw, context: method(_parsed_stream(raw, parse), context)
    return lambda raw, context: method(_parsed(raw, parse), context)


async def _parsed_stream(messages: AsyncIterator[bytes], parse: Parse) -> AsyncIterator[Any]:
    async for raw in messages:
        yield _parsed(raw, parse)


def _parsed(raw: bytes, parse: Parse) -> Any:
    try:
        return parse(raw)
    except DecodeError:
        reason = "is no message of the type that this method takes"
        raise InvalidRequest("request", f"{len(raw)} bytes", reason) from None


def _as_ours(failure: Exception) -> PacelineError:
    """What the caller is told. A bug of ours is logged; its text stays here."""
    if isinstance(failure, PacelineError):
        return failure
    _log.error("a call failed", exc_info=failure)
    return EngineFailure("internal error")
