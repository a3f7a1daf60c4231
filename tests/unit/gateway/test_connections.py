"""Connections that are slow, silent, too many or odd: bounded, and answered if they can be."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.fake_router_service import Reply, bytes_reply
from tests.support.gateway_client import raw_request, request_bytes, sse_events
from tests.support.gateway_deployment import Deployment, running
from tests.support.waits import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

READ_S = 0.3
LIVEZ = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = json.dumps({"model": "mock", "prompt": "Hi"}).encode()
COMPLETION = request_bytes("/v1/completions", BODY)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def strict(shared: Deployment) -> AsyncIterator[Deployment]:
    """At most 8 connections, all of them on short time."""
    settings = {"read_timeout_s": READ_S, "keep_alive_s": 1.0, "max_concurrent_requests": 2}
    async with running(shared.model_dir, **settings) as deployment:
        yield deployment


@pytest.fixture(autouse=True)
def fresh(strict: Deployment) -> None:
    strict.router.submissions.clear()


async def exchange(port: int, data: bytes, drip: bytes = b"", step_s: float = 0.05) -> bytes:
    """All that comes until the server closes; meanwhile `drip` is sent byte by byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)

    async def send_slowly() -> None:
        for byte in drip:
            await asyncio.sleep(step_s)
            writer.write(bytes([byte]))

    sender = asyncio.create_task(send_slowly())
    try:
        return await asyncio.wait_for(reader.read(-1), 5)
    except ConnectionError:
        return b""
    finally:
        sender.cancel()
        writer.close()


def statuses(received: bytes) -> list[int]:
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


SILENT: dict[str, tuple[bytes, bytes, list[int]]] = {
    "nothing": (b"", b"", []),
    "one stray byte": (b"\n", b"", []),
    "half a head": (LIVEZ[:20], b"", []),
    "a slow head": (b"", b"GET /livez HTTP/1.1\r\nhost: " + b"x" * 100, []),
    "line ends without end": (b"", b"\r\n" * 50, []),
    "a stray byte behind an answer": (LIVEZ, b"\r", [200]),
    "half a head behind an answer": (LIVEZ, LIVEZ[:5], [200]),
    "a body that nobody reads": (
        b"GET /livez HTTP/1.1\r\ncontent-length: 99\r\n\r\n",
        b"x" * 90,
        [200],
    ),
}


@pytest.mark.parametrize("name", SILENT)
async def test_a_slow_or_silent_client_is_cut(strict: Deployment, name: str) -> None:
    data, drip, expected = SILENT[name]
    started = time.monotonic()
    assert statuses(await exchange(strict.port, data, drip)) == expected
    assert time.monotonic() - started < 3 * READ_S
    assert strict.gateway.serving.num_running == 0


SLOW_BODIES = {
    "a slow body": (b"content-length: 99\r\n\r\n", b"x" * 90),
    "a chunk without end": (b"transfer-encoding: chunked\r\n\r\n", b"5;" + b"x" * 90),
}


@pytest.mark.parametrize("name", SLOW_BODIES)
async def test_a_slow_body_gets_408(strict: Deployment, name: str) -> None:
    fields, drip = SLOW_BODIES[name]
    reader, writer = await asyncio.open_connection("127.0.0.1", strict.port)
    writer.write(HEAD + fields)
    answer = asyncio.create_task(reader.readuntil(b"}}"))
    started = time.monotonic()
    for byte in drip:
        writer.write(bytes([byte]))
        if (await asyncio.wait([answer], timeout=0.02))[0]:
            break
    assert time.monotonic() - started < 2 * READ_S
    assert statuses(await answer) == [408] and b"connection: close" in await answer
    assert strict.gateway.serving.num_running == 0
    writer.close()


async def test_an_idle_connection_is_kept_longer_than_a_slow_one(strict: Deployment) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", strict.port)
    for _ in range(2):
        writer.write(LIVEZ)
        assert await asyncio.wait_for(reader.readuntil(b"ok\n"), 5)
        await asyncio.sleep(2 * READ_S)
    started = time.monotonic()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    assert time.monotonic() - started < 1
    writer.close()


@pytest.mark.parametrize("at", [len(COMPLETION), len(COMPLETION) - 5, 30])
async def test_a_client_that_closes_its_side_is_gone(strict: Deployment, at: int) -> None:
    strict.router.reply = lambda request: Reply([[97]], delay_s=30)
    reader, writer = await asyncio.open_connection("127.0.0.1", strict.port)
    writer.write(COMPLETION[:at])
    await asyncio.sleep(0.02)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 1) == b""
    await until(lambda: strict.gateway.serving.num_running == 0)
    writer.close()


def slow_client(port: int, **wishes: Any) -> socket.socket:
    """Has asked for some megabytes, of which the kernel takes little."""
    body = {"model": "mock", "prompt": "Hi", "logprobs": 20, "max_tokens": 200, **wishes}
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(request_bytes("/v1/completions", json.dumps(body).encode()))
    client.setblocking(False)
    return client


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_never_reads_is_cut(strict: Deployment, stream: bool) -> None:
    """Its answer has ended: neither a full mailbox nor the time limit of requests would do it."""
    strict.router.reply = lambda request: Reply([[97] * 100] * 60)
    connections = strict.gateway._http._server.server_state.connections
    with slow_client(strict.port, stream=stream):
        await until(lambda: bool(strict.router.submissions))
        await until(lambda: not connections)
        assert strict.gateway.serving.num_running == 0


async def test_a_slow_reader_loses_nothing(strict: Deployment) -> None:
    strict.router.reply = lambda request: Reply([[97] * 100] * 60)
    loop = asyncio.get_running_loop()
    with slow_client(strict.port) as client:
        head, received = (await loop.sock_recv(client, 1024)).split(b"\r\n\r\n")
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        num_bytes = len(received)
        for target in range(0, length, length // 6):
            await asyncio.sleep(READ_S / 2)
            while num_bytes < min(target, length):
                received = await loop.sock_recv(client, 1 << 16)
                assert received
                num_bytes += len(received)
        assert length > 1 << 20


async def test_too_many_connections_cost_the_longest_idle(strict: Deployment) -> None:
    strict.router.reply = lambda request: bytes_reply(b"0123456789", interval_s=0.05)
    busy = asyncio.create_task(strict.complete(stream=True))
    await until(lambda: strict.gateway.serving.num_running == 1)
    idle = [await asyncio.open_connection("127.0.0.1", strict.port) for _ in range(30)]
    for _ in range(3):
        assert (await raw_request(strict.port, LIVEZ))[0] == 200
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(idle[0][0].readexactly(1), READ_S / 2)
    assert "[DONE]" in (await busy).text
    for _, writer in idle:
        writer.close()


FRAMINGS = {
    "length": b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "chunks": b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
}
UPGRADES = ("h2c", "websocket", "TLS/1.0")


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("pieces", [1, 1000])
async def test_a_wish_for_another_protocol_is_ignored(
    deployment: Deployment, framing: str, pieces: int
) -> None:
    requests = b""
    for protocol in UPGRADES:
        requests += HEAD + b"Connection: keep-alive, Upgrade, HTTP2-Settings\r\n"
        requests += b"Upgrade: %b\r\nHTTP2-Settings: AAMAAABk\r\n" % protocol.encode()
        requests += FRAMINGS[framing]
    last = request_bytes("/v1/completions", BODY, "connection: close")
    data = requests + last
    first, rest = (data, b"") if pieces == 1 else (b"", data)
    received = await exchange(deployment.port, first, rest, 0)
    assert statuses(received) == [200] * 4
    assert len(deployment.router.submissions) == 4


HEADS = {
    "many fields": b"a: b\r\n" * 50_000,
    "a long field": b"a: " + b"b" * 200_000,
    "a field without end": b"a: " + b"b" * (8 << 20),
    "a long name": b"a" * 200_000 + b": b\r\n",
    "fields of spaces": (b"a: " + b" " * 1000 + b"b\r\n") * 100,
    "too many fields": b"a: b\r\n" * 257,
    "too many empty fields": b"a:\r\n" * 10_000,
}


@pytest.mark.parametrize("name", HEADS)
async def test_a_head_that_is_too_large_gets_431(deployment: Deployment, name: str) -> None:
    head = b"GET /livez HTTP/1.1\r\n" + HEADS[name]
    status, headers, body = await raw_request(deployment.port, head + b"\r\n\r\n")
    assert status == 431 and headers["connection"] == "close"
    error = json.loads(body)["error"]
    limit = "256 fields" if "many" in name else "65536 bytes"
    assert error["type"] == "invalid_request_error" and limit in error["message"]
    assert (await deployment.http.get("/livez")).status_code == 200


@pytest.mark.parametrize("name", HEADS)
async def test_what_follows_a_head_does_not_hide_its_size(
    deployment: Deployment, name: str
) -> None:
    """A body and another request that come with it in one piece."""
    request = COMPLETION.replace(b"host: test\r\n", b"host: test\r\n" + HEADS[name])
    status, headers, _ = await raw_request(deployment.port, request + LIVEZ)
    assert status == 431 and headers["connection"] == "close"
    assert not deployment.router.submissions


async def test_a_head_within_its_limits_is_served(deployment: Deployment) -> None:
    fields = b"a: b\r\n" * 253 + b"b: " + b"x" * 62_000 + b"\r\n"
    request = COMPLETION.replace(b"host: test\r\n", b"host: test\r\n" + fields)
    received = await exchange(deployment.port, request * 3 + b"GET / HTTP/0.9\r\n\r\n")
    assert statuses(received)[:3] == [200] * 3


async def test_trailers_count_as_head(deployment: Deployment) -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    assert (await raw_request(deployment.port, chunked + HEADS["a field without end"]))[0] == 431


JUNK = {
    "no HTTP": (b"JUNK\r\n\r\n", 400),
    "a bad chunk": (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    "two lengths": (HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab", 400),
    "CONNECT": (b"CONNECT a:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "chunks in HTTP/1.0": (
        HEAD.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n",
        400,
    ),
}


@pytest.mark.parametrize("name", JUNK)
async def test_broken_http_gets_an_openai_body(deployment: Deployment, name: str) -> None:
    data, expected = JUNK[name]
    status, headers, body = await raw_request(deployment.port, data)
    assert status == expected and headers["connection"] == "close"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", JUNK)
async def test_a_request_before_broken_http_is_answered(deployment: Deployment, name: str) -> None:
    received = await exchange(deployment.port, COMPLETION + JUNK[name][0])
    assert statuses(received)[0] == 200 and b'"text":"Hello"' in received


async def test_a_stream_over_http_1_0_ends_with_its_connection(deployment: Deployment) -> None:
    """As nginx asks for it, unless it is told otherwise."""
    body: dict[str, Any] = {"model": "mock", "prompt": "Hi", "stream": True}
    request = request_bytes("/v1/completions", json.dumps(body).encode())
    received = await exchange(deployment.port, request.replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, text = received.decode().split("\r\n\r\n", 1)
    assert "transfer-encoding" not in head and "connection: close" in head
    *chunks, done = sse_events(text)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello" and done == "[DONE]"
