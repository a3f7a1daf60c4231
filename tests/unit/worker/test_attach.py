"""Attach over real gRPC: a router that never reads costs bounded memory and then its stream."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from paceline.core.errors import PacelineError, Unavailable
from paceline.rpc import caller_token
from paceline.rpc.channel import connect, make_server
from paceline.rpc.status import tells_end
from paceline.v1 import worker_pb2, worker_pb2_grpc
from paceline.worker.attach import AttachServicer
from paceline.worker.router_stream import RouterStream

SECRET = b"deployment"


class FloodedSession:
    """Stands for a session whose engine emits without end."""

    def __init__(self) -> None:
        self.info = worker_pb2.WorkerInfo(worker_id="w")
        self.streams: set[RouterStream] = set()
        self.ended = asyncio.Event()

    def load_now(self) -> worker_pb2.Load:
        return worker_pb2.Load()

    def end_stream(self, stream: RouterStream, end: PacelineError) -> None:
        stream.close(end)
        if stream in self.streams:
            self.streams.discard(stream)
        self.ended.set()

    async def flood(self) -> int:
        """Frames of 64 KiB to the only stream, until it closes."""
        (stream,) = self.streams
        num_frames = 0
        while not stream.is_closed:
            for slot in range(6000):
                stream.add_ended(2**63 + slot)
            stream.flush(self.load_now())
            num_frames += 1
            await asyncio.sleep(0)
        return num_frames


@pytest.fixture
async def session() -> FloodedSession:
    return FloodedSession()


@pytest.fixture
async def endpoint(session: FloodedSession) -> AsyncIterator[str]:
    server = make_server(SECRET)
    servicer = AttachServicer(lambda: session)  # type: ignore[arg-type, return-value]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_router_that_never_reads_is_let_go(session: FloodedSession, endpoint: str) -> None:
    token = caller_token.metadata(SECRET)
    async with connect(endpoint) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Attach(metadata=token)  # type: ignore[no-untyped-call]
        assert (await call.read()).info.worker_id == "w"
        num_frames = await asyncio.wait_for(session.flood(), 10)
        assert num_frames < 3000
        async with asyncio.timeout(5):
            await session.ended.wait()  # though its write was stuck
        call.cancel()


async def test_attach_says_why_there_is_nothing_to_attach_to() -> None:
    def loading() -> None:
        raise Unavailable("the model is being loaded")

    server = make_server(SECRET)
    servicer = AttachServicer(loading)  # type: ignore[arg-type]
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    token = caller_token.metadata(SECRET)
    async with connect(f"127.0.0.1:{port}") as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Attach(metadata=token)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    await server.stop(None)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert tells_end(refused.value), "whoever lived there does no more"
    assert refused.value.details() == "the model is being loaded"
