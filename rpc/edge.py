"""What stands before every servicer of ours: asks for the caller's token, answers errors.

A servicer raises what is wrong; here, and only here, it becomes a gRPC status (rpc/status.py).
Services that are not ours (health, reflection) are left as they are.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import structlog

from paceline.core.errors import EngineFailure, IncompatiblePeer, PacelineError
from paceline.rpc import caller_token
from paceline.rpc.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler, whose attributes are not in its types
Method = Callable[[Any, Context], Any]

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
        if handler is None or not handler_call_details.method.startswith(_OURS):
            return handler
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        method = getattr(handler, kind)
        is_generator = inspect.isasyncgenfunction(method)
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            self._generator(method) if is_generator else self._coroutine(method),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _coroutine(self, method: Method) -> Method:
        async def edged(request: Any, context: Context) -> Any:
            await self._admit(context)
            try:
                return await method(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as failure:
                await abort(context, _as_ours(failure))

        return edged

    def _generator(self, method: Method) -> Method:
        async def edged(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._admit(context)
            try:
                async with aclosing(method(request, context)) as responses:
                    async for response in responses:
                        yield response
            except grpc.aio.AbortError:
                raise
            except Exception as failure:
                await abort(context, _as_ours(failure))

        return edged

    async def _admit(self, context: Context) -> None:
        if self._secret is None:
            return
        try:
            caller_token.check(context.invocation_metadata() or (), self._secret)
        except IncompatiblePeer as error:
            await abort(context, error, grpc.StatusCode.UNAUTHENTICATED)


def _as_ours(failure: Exception) -> PacelineError:
    """What the caller is told. A bug of ours is logged; its text stays here."""
    if isinstance(failure, PacelineError):
        return failure
    _log.error("a call failed", exc_info=failure)
    return EngineFailure("internal error")
