"""Stands between a reader and its source's KvTransferService and sees every message of theirs.

Tests give a reader the proxy's endpoint instead of the source's. What a `Seam` does with a message
is up to the test: look, wait, lose it. The product knows nothing of it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from paceline.rpc.caller_token import TOKEN
from paceline.v1 import kv_pb2

SERVICE = "paceline.v1.KvTransferService"
UNARY: dict[str, tuple[type[Message], type[Message]]] = {
    "Describe": (kv_pb2.DescribeRequest, kv_pb2.DescribeResponse),
    "Pin": (kv_pb2.PinRequest, kv_pb2.PinResponse),
    "Unpin": (kv_pb2.UnpinRequest, kv_pb2.UnpinResponse),
    "Report": (kv_pb2.ReportRequest, kv_pb2.ReportResponse),
}
_PINGED_OFTEN = [
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
]
Context = grpc.aio.ServicerContext[Any, Any]
Call = Callable[[Any, Context], Awaitable[Any]]


class Lost(Exception):
    """Raised by a seam: the message does not arrive."""


class Seam:
    """Told of each message before it goes on. This one lets all of them pass."""

    num_copies = 1  # of each call and each beat that the source gets
    swaps_beats = False  # two by two

    async def asked(self, method: str, request: Any) -> None:
        """A reader's request. Raises Lost."""

    async def answered(self, method: str, answer: Any) -> None:
        """The source's answer, or an event of a stream; may be edited in place. Raises Lost."""


class KvProxy:
    """Use `start` and `close`; `source` is looked at when a call is made."""

    def __init__(self, source: str, seam: Seam) -> None:
        self.seam = seam
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.source = source
        self._server = grpc.aio.server(options=_PINGED_OFTEN)
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._unary(name),
                request_deserializer=asked.FromString,
                response_serializer=answer.SerializeToString,
            )
            for name, (asked, answer) in UNARY.items()
        }
        handlers["Progress"] = grpc.unary_stream_rpc_method_handler(
            self._progress,
            request_deserializer=kv_pb2.ProgressRequest.FromString,
            response_serializer=kv_pb2.ProgressEvent.SerializeToString,
        )
        handlers["KeepLeases"] = grpc.stream_stream_rpc_method_handler(
            self._keep_leases,
            request_deserializer=kv_pb2.LeaseBeat.FromString,
            response_serializer=kv_pb2.LeaseBeatReply.SerializeToString,
        )
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    async def start(self) -> None:
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(0)
        for channel in self._channels.values():
            await channel.close(None)

    @property
    def _channel(self) -> grpc.aio.Channel:
        if self.source not in self._channels:
            options = [("grpc.max_reconnect_backoff_ms", 200)]
            self._channels[self.source] = grpc.aio.insecure_channel(self.source, options=options)
        return self._channels[self.source]

    def _unary(self, name: str) -> Call:
        asked, answer = UNARY[name]

        async def handle(request: Any, context: Context) -> Any:
            try:
                await self.seam.asked(name, request)
                for _ in range(self.seam.num_copies):
                    call = self._channel.unary_unary(
                        f"/{SERVICE}/{name}",
                        request_serializer=asked.SerializeToString,
                        response_deserializer=answer.FromString,
                    )
                    left_s = context.time_remaining()
                    got = await call(request, metadata=_token_of(context), timeout=left_s)
                await self.seam.answered(name, got)
            except grpc.aio.AioRpcError as failure:
                await _abort_like(context, failure)
            except Lost:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
            return got

        return handle

    async def _progress(
        self, request: kv_pb2.ProgressRequest, context: Context
    ) -> AsyncIterator[kv_pb2.ProgressEvent]:
        call = self._channel.unary_stream(
            f"/{SERVICE}/Progress",
            request_serializer=kv_pb2.ProgressRequest.SerializeToString,
            response_deserializer=kv_pb2.ProgressEvent.FromString,
        )(request, metadata=_token_of(context), timeout=context.time_remaining())
        try:
            async for event in call:
                await self.seam.answered("Progress", event)
                yield event
        except grpc.aio.AioRpcError as failure:
            await _abort_like(context, failure)
        except Lost:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
        finally:
            call.cancel()

    async def _keep_leases(
        self, beats: AsyncIterator[kv_pb2.LeaseBeat], context: Context
    ) -> AsyncIterator[kv_pb2.LeaseBeatReply]:
        call = self._channel.stream_stream(
            f"/{SERVICE}/KeepLeases",
            request_serializer=kv_pb2.LeaseBeat.SerializeToString,
            response_deserializer=kv_pb2.LeaseBeatReply.FromString,
        )(self._beats(beats), metadata=_token_of(context))
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as failure:
            await _abort_like(context, failure)
        finally:
            call.cancel()

    async def _beats(
        self, beats: AsyncIterator[kv_pb2.LeaseBeat]
    ) -> AsyncIterator[kv_pb2.LeaseBeat]:
        held: kv_pb2.LeaseBeat | None = None
        async for beat in beats:
            await self.seam.asked("KeepLeases", beat)
            if self.seam.swaps_beats and held is None:
                held = beat
                continue
            for _ in range(self.seam.num_copies):
                yield beat
            if held is not None:
                yield held
                held = None


def _token_of(context: Context) -> tuple[tuple[str, str | bytes], ...]:
    given = context.invocation_metadata() or ()
    return tuple((name, value) for name, value in given if name == TOKEN)


async def _abort_like(context: Context, failure: grpc.aio.AioRpcError) -> None:
    metadata: Any = failure.trailing_metadata()  # iterable, whatever its stub says
    trailers = tuple((name, value) for name, value in metadata if name.startswith("paceline"))
    await context.abort(failure.code(), failure.details() or "", trailers)
