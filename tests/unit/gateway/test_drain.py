"""A gateway that stops waits for what runs, and for nothing else."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from paceline.core.errors import Overloaded, Unavailable
from paceline.rpc import open_calls
from paceline.rpc.channel import connect
from paceline.rpc.status import error_of
from paceline.v1.generate_pb2 import GenerateRequest
from paceline.v1.generate_pb2_grpc import GenerateServiceStub
from tests.support.fake_router_service import bytes_reply
from tests.support.gateway_deployment import Deployment, running
from tests.support.waits import until

GENERATE, WATCH = "/paceline.v1.GenerateService/Generate", "/grpc.health.v1.Health/Watch"
LIVEZ = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
HALF = b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{"model"'
UNFINISHED = {
    "nothing": (b"", b""),
    "half a head": (HALF[:20], b""),
    "half a body": (HALF, b"HTTP/1.1 503"),
    "half a chunk": (
        HALF.replace(b"content-length: 500", b"transfer-encoding: chunked") + b"\r\n5\r\n",
        b"HTTP/1.1 ",
    ),
    "half a body behind an answer": (LIVEZ + HALF, b"HTTP/1.1 200"),
}


@asynccontextmanager
async def opened(model_dir: Path, **settings: Any) -> AsyncIterator[tuple[Deployment, Any]]:
    """A gateway with long limits, and a channel to it."""
    limits = {"drain_timeout_s": 30.0, "read_timeout_s": 30.0, **settings}
    async with (
        running(model_dir, **limits) as deployment,
        connect(f"127.0.0.1:{deployment.gateway.grpc_port}") as channel,
    ):
        yield deployment, channel


@pytest.mark.parametrize("name", UNFINISHED)
async def test_an_unfinished_request_does_not_hold_up_a_drain(model_dir: Path, name: str) -> None:
    sent, answer = UNFINISHED[name]
    async with opened(model_dir) as (deployment, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
        writer.write(sent)
        await asyncio.sleep(0.05)
        started = time.monotonic()
        received, _ = await asyncio.gather(reader.read(-1), deployment.gateway.drain())
        assert time.monotonic() - started < 4
        assert received.startswith(answer)
        if b"503" in received:
            assert b'"code":"unavailable"' in received and b"shutting down" in received
        writer.close()


async def test_calls_that_wait_for_their_caller_do_not_either(model_dir: Path) -> None:
    """And a stream that runs meanwhile goes on to its end."""
    async with opened(model_dir) as (deployment, channel):
        deployment.router.reply = lambda request: bytes_reply(b"0123456789", interval_s=0.1)
        silent = [channel.stream_stream(GENERATE)() for _ in range(3)]
        watch = channel.unary_stream(WATCH)(b"")
        assert await watch.read()
        waits = deployment.gateway._grpc._edge._calls._first_waits
        await until(lambda: len(waits) == 3)
        stub = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(GenerateRequest(text="Hi"))
        text = (await call.read()).text
        started = time.monotonic()
        draining = asyncio.create_task(deployment.gateway.drain())
        for waiting in (*silent, watch):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await waiting.read() is not grpc.aio.EOF:
                    pass  # a watcher may hear of the end first
                raise AssertionError("ended without an error")
            assert isinstance(error_of(caught.value), Unavailable)
        assert time.monotonic() - started < 0.5
        while (response := await call.read()) is not grpc.aio.EOF:
            text += response.text
        await draining
        assert time.monotonic() - started < 3
        assert text == "0123456789"


async def test_what_outlasts_the_drain_is_told_so(model_dir: Path) -> None:
    """A stream never just stops."""
    async with opened(model_dir, drain_timeout_s=0.5) as (deployment, channel):
        deployment.router.reply = lambda request: bytes_reply(b"x" * 200, interval_s=0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", deployment.port)
        body = b'{"model":"mock","prompt":"Hi","max_tokens":200,"stream":true}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await asyncio.wait_for(reader.readuntil(b"data: "), 5)
        stub = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Generate(GenerateRequest(text="Hi", max_tokens=200))
        assert (await call.read()).text == "x"
        started = time.monotonic()
        received, _ = await asyncio.gather(reader.read(-1), deployment.gateway.drain())
        assert time.monotonic() - started < 2
        assert b'"code":"unavailable"' in received and b"shutting down" in received
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert isinstance(error_of(caught.value), Unavailable)
        writer.close()


async def test_calls_without_a_message_keep_nobody_out(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of too many the one that waits longest is ended; none counts as a request."""
    monkeypatch.setattr(open_calls, "MAX_WAITING_CALLS", 3)
    async with opened(model_dir, max_concurrent_requests=2) as (deployment, channel):
        waits = deployment.gateway._grpc._edge._calls._first_waits
        silent = [channel.stream_stream(GENERATE)() for _ in range(3)]
        await until(lambda: len(waits) == 3)
        assert deployment.gateway.serving.num_running == 0
        assert (await deployment.complete()).status_code == 200
        stub = GenerateServiceStub(channel)  # type: ignore[no-untyped-call]
        for num_left in (2, 2):
            call = stub.Generate(GenerateRequest(text="Hi"), timeout=5)
            assert "".join([response.text async for response in call]) == "Hello"
            assert len(waits) == num_left
        reads = [asyncio.create_task(call.read()) for call in silent]
        (ended,), _ = await asyncio.wait(reads, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ended  # not always the first that was made: they may arrive in another order
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error_of(caught.value), Overloaded)
        text = generate_latest(deployment.gateway.serving.metrics.registry)
        assert b'errors_total{code="overloaded"} 1.0' in text
        for call in silent:
            call.cancel()
        await asyncio.gather(*reads, return_exceptions=True)


async def test_a_message_that_does_not_come_is_waited_for_no_longer(model_dir: Path) -> None:
    async with opened(model_dir, read_timeout_s=0.2) as (deployment, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_stream(GENERATE)().read()
        assert caught.value.details() == "request='no message': did not arrive within 0.2 s"
        assert deployment.gateway.serving.num_running == 0
