"""The edge of every server, over real gRPC: who is let in, and what errors become."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.core.errors import (
    IncompatiblePeer,
    InvalidRequest,
    KvUnavailable,
    Overloaded,
    PacelineError,
)
from paceline.rpc import caller_token, open_calls
from paceline.rpc import channel as channel_settings
from paceline.rpc.channel import connect, make_server
from paceline.rpc.edge import Edge
from paceline.rpc.open_calls import OpenCalls
from paceline.rpc.status import error_of
from paceline.v1 import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.waits import until

SECRET = b"deployment"


class Kv(kv_pb2_grpc.KvTransferServiceServicer):
    async def Unpin(self, request: kv_pb2.UnpinRequest, context: Any) -> kv_pb2.UnpinResponse:
        if request.lease_id == "busy":
            raise Overloaded("too many pins", retry_after_s=0.5)
        if request.lease_id == "bug":
            raise KeyError("/a/path")
        return kv_pb2.UnpinResponse()

    async def Progress(
        self, request: kv_pb2.ProgressRequest, context: Any
    ) -> AsyncIterator[kv_pb2.ProgressEvent]:
        yield kv_pb2.ProgressEvent(num_committed_blocks=1)
        raise KvUnavailable("the hand-off is not held here")

    async def KeepLeases(
        self, request_iterator: AsyncIterator[kv_pb2.LeaseBeat], context: Any
    ) -> AsyncIterator[kv_pb2.LeaseBeatReply]:
        async for beat in request_iterator:
            yield kv_pb2.LeaseBeatReply(unknown_lease_ids=beat.lease_ids)


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    async def Attach(self, request_iterator: Any, context: Any) -> None:
        """Written as a coroutine, which gRPC allows too."""
        await context.write(worker_pb2.WorkerFrame(ended_slots=[7]))
        raise Overloaded("the stream is too slow")


@asynccontextmanager
async def serving(secret: bytes | None, first_message_s: float = 5) -> AsyncIterator[Any]:
    """Yields a channel; `edge` and `server` are attributes of it."""
    edge = Edge(secret, calls=OpenCalls(first_message_s))
    server = make_server(edge)
    kv_pb2_grpc.add_KvTransferServiceServicer_to_server(Kv(), server)  # type: ignore[no-untyped-call]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), server)  # type: ignore[no-untyped-call]
    reflection.enable_server_reflection(["paceline.v1.KvTransferService"], server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)  # type: ignore[attr-defined]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        channel.edge, channel.server = edge, server  # type: ignore[attr-defined]
        yield channel
    await server.stop(None)


def kv(channel: grpc.aio.Channel) -> kv_pb2_grpc.KvTransferServiceStub:
    return kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]


def attach(channel: grpc.aio.Channel, metadata: caller_token.Metadata = ()) -> Any:
    return worker_pb2_grpc.WorkerServiceStub(channel).Attach(metadata=metadata)  # type: ignore[no-untyped-call]


async def test_a_caller_with_the_secret_is_let_in() -> None:
    async with serving(SECRET) as channel:
        metadata = caller_token.metadata(SECRET)
        assert await kv(channel).Unpin(kv_pb2.UnpinRequest(), metadata=metadata)
        assert (await attach(channel, metadata).read()).ended_slots == [7]


def made_at(monkeypatch: pytest.MonkeyPatch, now_s: float) -> caller_token.Metadata:
    with monkeypatch.context() as patched:
        patched.setattr(caller_token.time, "time", lambda: now_s)
        return caller_token.metadata(SECRET)


async def test_strangers_are_refused_on_every_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    old = made_at(monkeypatch, 1_700_000_000.0)
    future = made_at(monkeypatch, 9_000_000_000.0)
    others = caller_token.metadata(b"other")
    ((_, good),) = caller_token.metadata(SECRET)
    made_ms, digest = good.split(".")
    forged = ((caller_token.TOKEN, f"{int(made_ms) + 1}.{digest}"),)
    junk = [((caller_token.TOKEN, text),) for text in ("", ".", "x.y", f"-1.{digest}", made_ms)]
    async with serving(SECRET) as channel:
        for metadata in ((), others, old, future, forged, *junk):
            calls = (
                kv(channel).Unpin(kv_pb2.UnpinRequest(), metadata=metadata),
                kv(channel).Progress(kv_pb2.ProgressRequest(), metadata=metadata).read(),
                attach(channel, metadata).read(),
            )
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
                error = error_of(refused.value)
                assert isinstance(error, IncompatiblePeer) and error.field == "secret"


async def test_a_public_server_asks_for_nothing() -> None:
    async with serving(None) as channel:
        assert await kv(channel).Unpin(kv_pb2.UnpinRequest())


async def test_health_is_open_to_all() -> None:
    async with serving(SECRET) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_an_error_that_a_servicer_raises_becomes_its_status() -> None:
    async with serving(None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kv(channel).Unpin(kv_pb2.UnpinRequest(lease_id="busy"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = error_of(refused.value)
        assert isinstance(error, Overloaded) and error.retry_after_s == 0.5

        events = kv(channel).Progress(kv_pb2.ProgressRequest())
        assert (await events.read()).num_committed_blocks == 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await events.read()
        assert refused.value.code() is grpc.StatusCode.ABORTED
        assert isinstance(error_of(refused.value), KvUnavailable)

        frames = attach(channel)
        assert (await frames.read()).ended_slots == [7]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await frames.read()
        assert refused.value.details() == "the stream is too slow"


NO_MESSAGE = "is no message of the type that this method takes"
JUNK = b"\xff\xff\xff not a message"
LEASES = "/paceline.v1.KvTransferService/KeepLeases"
HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


async def test_a_message_that_does_not_parse_is_the_callers_fault() -> None:
    """In every kind of call, of services that are not ours, too."""
    async with serving(None) as channel:
        stream = channel.stream_stream(LEASES)()
        await stream.write(kv_pb2.LeaseBeat(lease_ids=["a"]).SerializeToString())
        assert kv_pb2.LeaseBeatReply.FromString(await stream.read()).unknown_lease_ids == ["a"]
        await stream.write(JUNK)
        reflected = channel.stream_stream(REFLECTION)()
        await reflected.write(JUNK)
        calls = (
            channel.unary_unary("/paceline.v1.KvTransferService/Unpin")(JUNK),
            channel.unary_stream("/paceline.v1.KvTransferService/Progress")(JUNK).read(),
            stream.read(),
            channel.unary_unary(HEALTH + "Check")(JUNK),
            channel.unary_stream(HEALTH + "Watch")(JUNK).read(),
            reflected.read(),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            error = error_of(refused.value)
            assert isinstance(error, InvalidRequest) and error.field == "request"
            assert refused.value.details() == f"request='{len(JUNK)} bytes': {NO_MESSAGE}"


UNARY = (
    "/paceline.v1.KvTransferService/Unpin",
    "/paceline.v1.KvTransferService/Progress",
    HEALTH + "Check",
    HEALTH + "Watch",
)


async def refusal(call: Any) -> tuple[grpc.StatusCode, PacelineError]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async with asyncio.timeout(4):
            await call.read()
    return refused.value.code(), error_of(refused.value)


@pytest.mark.parametrize("method", UNARY)
async def test_a_message_that_does_not_come_is_waited_for_no_longer(method: str) -> None:
    async with serving(None, first_message_s=0.1) as channel:
        silent, empty = channel.stream_stream(method)(), channel.stream_stream(method)()
        await empty.done_writing()
        for call, reason in ((silent, "did not arrive within 0.1 s"), (empty, "sent none")):
            status, error = await refusal(call)
            assert status is grpc.StatusCode.INVALID_ARGUMENT
            assert error.field == "request" and reason in error.message


@pytest.mark.parametrize("method", UNARY[:2])
async def test_a_stranger_is_refused_before_its_message_comes(method: str) -> None:
    async with serving(SECRET) as channel:
        status, _ = await refusal(channel.stream_stream(method)())
        assert status is grpc.StatusCode.UNAUTHENTICATED


async def test_calls_that_only_wait_do_not_hold_up_a_stop() -> None:
    async with serving(None) as channel:
        waiting = [channel.stream_stream(method)() for method in (*UNARY, REFLECTION)]
        watch = channel.unary_stream(HEALTH + "Watch")(b"")
        assert await watch.read()
        idle = channel.stream_stream(REFLECTION)()
        await idle.write(b"")
        assert await idle.read()
        async with asyncio.timeout(2):
            await channel.edge.stop(30)
            await channel.server.stop(30)
        for call in (*waiting, watch, idle):
            assert (await refusal(call))[0] is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("sent", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_connections_that_say_nothing_do_not_hold_up_a_stop_for_long(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(channel_settings, "HANDSHAKE_MS", 300)
    server = make_server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await asyncio.sleep(0.05)
    async with asyncio.timeout(3):
        await server.stop(30)
        await reader.read(-1)
    writer.close()


async def test_calls_of_other_services_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_calls, "MAX_FOREIGN_CALLS", 2)
    async with serving(None) as channel:
        watches = [channel.unary_stream(HEALTH + "Watch")(b"") for _ in range(2)]
        for watch in watches:
            assert await watch.read()
        status, _ = await refusal(channel.unary_stream(HEALTH + "Watch")(b""))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await kv(channel).Unpin(kv_pb2.UnpinRequest())
        watches[0].cancel()
        await until(lambda: channel.edge._calls._num_foreign == 1)
        assert await channel.unary_stream(HEALTH + "Watch")(b"").read()


async def test_a_bug_tells_the_caller_nothing() -> None:
    async with serving(None) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kv(channel).Unpin(kv_pb2.UnpinRequest(lease_id="bug"))
        assert refused.value.code() is grpc.StatusCode.INTERNAL
        assert refused.value.details() == "internal error"
