"""What stands before every servicer: asks for the caller's token, reads messages, answers errors.

A servicer raises what is wrong; here, and only here, it becomes a gRPC status (rpc/status.py).
Messages are parsed here, too: gRPC itself answers UNKNOWN to one that does not parse. A servicer
gets them as its argument; `context.read()` would give bytes. Towards gRPC every method takes a
stream of messages: it would wait for ever for the one of a unary call, before we hear of the call.
Services that are not ours (health, reflection) ask for no token.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from functools import partial
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from paceline.core.errors import EngineFailure, IncompatiblePeer, InvalidRequest, PacelineError
from paceline.rpc import caller_token
from paceline.rpc.open_calls import OpenCalls
from paceline.rpc.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any  # grpc.RpcMethodHandler, whose attributes are not in its types
Method = Callable[[Any, Context], Any]
Parse = Callable[[bytes], Any]
Gate = Callable[[Context], AbstractContextManager[None]]
Guard = Callable[[Context], AbstractAsyncContextManager[None]]
Intake = Callable[[AsyncIterator[bytes], Context], Awaitable[Any]]

_OURS = "/paceline."
_log = structlog.get_logger("paceline.rpc")


def _open(context: Context) -> AbstractContextManager[None]:
    return nullcontext()


class Edge(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """`secret`: callers must know it; None for a public API. `peer_name`: their certificates must
    carry it, where they have some. `known` is around every call of ours, `gate` around it from when
    its first message is here; both may refuse it."""

    def __init__(
        self,
        secret: bytes | None,
        calls: OpenCalls | None = None,
        *,
        known: Gate = _open,
        gate: Gate = _open,
        peer_name: str = "",
    ) -> None:
        self._secret = secret
        self._peer_name = peer_name
        self._known = known
        self._gate = gate
        self._calls = calls or OpenCalls()
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def stop(self, timeout_s: float) -> None:
        """Ends calls that only wait for their caller; returns when none is left, or time is up."""
        self._calls.stop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        request = "stream" if handler.request_streaming else "unary"
        response = "stream" if handler.response_streaming else "unary"
        method = getattr(handler, f"{request}_{response}")
        is_ours = handler_call_details.method.startswith(_OURS)
        guard = self._ours if is_ours else self._foreign
        gate = self._gate if is_ours else _open
        read = self._messages if handler.request_streaming else self._message
        edged = _generator if inspect.isasyncgenfunction(method) else _coroutine
        return getattr(grpc, f"stream_{response}_rpc_method_handler")(
            edged(method, guard, partial(read, handler.request_deserializer), gate),
            None,
            handler.response_serializer,
        )

    async def _messages(
        self, parse: Parse, messages: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[Any]:
        return _parsed_stream(messages, parse)

    async def _message(self, parse: Parse, messages: AsyncIterator[bytes], context: Context) -> Any:
        return _parsed(await self._calls.first_message(context), parse)

    @asynccontextmanager
    async def _ours(self, context: Context) -> AsyncIterator[None]:
        try:
            self._check_caller(context)
        except IncompatiblePeer as error:
            await abort(context, error, grpc.StatusCode.UNAUTHENTICATED)
        with self._known(context), self._running():
            yield

    def _check_caller(self, context: Context) -> None:
        """gRPC has checked who signed the certificate, but lets a client have any name."""
        if self._peer_name:
            names = context.auth_context().get("x509_subject_alternative_name", ())
            if self._peer_name.encode() not in names:
                reason = "the caller's certificate does not carry the name of PACELINE_TLS_NAME"
                raise IncompatiblePeer(reason, field="tls")
        if self._secret is not None:
            caller_token.check(context.invocation_metadata() or (), self._secret)

    @asynccontextmanager
    async def _foreign(self, context: Context) -> AsyncIterator[None]:
        async with self._calls.foreign():
            with self._running():
                yield

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()


def _coroutine(method: Method, guard: Guard, intake: Intake, gate: Gate) -> Method:
    async def edged(messages: AsyncIterator[bytes], context: Context) -> Any:
        try:
            async with guard(context):
                request = await intake(messages, context)
                with gate(context):
                    return await method(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as failure:  # the edge of the process: all that fails gets a status
            await abort(context, _as_ours(failure))

    return edged


def _generator(method: Method, guard: Guard, intake: Intake, gate: Gate) -> Method:
    async def edged(messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        try:
            async with guard(context):
                request = await intake(messages, context)
                with gate(context):
                    async with aclosing(method(request, context)) as responses:
                        async for response in responses:
                            yield response
        except grpc.aio.AbortError:
            raise
        except Exception as failure:  # the edge of the process: all that fails gets a status
            await abort(context, _as_ours(failure))

    return edged


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
