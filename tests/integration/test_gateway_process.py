"""The gateway as a process: starts without torch, drains on SIGTERM, exits 0."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.support.fake_router_service import bytes_reply
from tests.support.gateway_client import raw_request, request_bytes
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.key_file import entry, write
from tests.support.waits import until


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    async with gateway_process(tmp_path, "--drain-timeout-s", "5") as running:
        yield running


def chat_request(**fields: object) -> bytes:
    messages = [{"role": "user", "content": "Hi"}]
    body = json.dumps({"model": "mock", "messages": messages, **fields}).encode()
    return request_bytes("/v1/chat/completions", body)


async def test_it_drains_a_running_stream_and_exits_0(gateway: GatewayProcess) -> None:
    await gateway.is_ready()
    gateway.router.reply = lambda request: bytes_reply(b"0123456789", interval_s=0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(chat_request(stream=True))
    await reader.readuntil(b'"content":"1"')
    gateway.process.send_signal(signal.SIGTERM)
    rest = await asyncio.wait_for(reader.read(), 5)
    assert b'"content":"9"' in rest and b'"finish_reason":"length"' in rest and b"[DONE]" in rest
    assert await asyncio.wait_for(gateway.process.wait(), 5) == 0
    with pytest.raises(ConnectionError):
        await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.close()


async def test_a_grpc_client_that_never_reacts_does_not_hold_up_its_end(
    gateway: GatewayProcess,
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.grpc_port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
    await reader.read(1)  # the connection stands
    gateway.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(gateway.process.wait(), 4) == 0  # of 5 that streams may take
    writer.close()


async def test_a_hangup_has_it_read_its_key_file_again(tmp_path: Path) -> None:
    """Of a file that is the same to the look, and once of one that has become wrong."""
    keys = write(tmp_path / "keys.toml", entry("acme", ["k" * 32]))
    async with gateway_process(tmp_path, "--api-keys", str(keys)) as gateway:
        await gateway.is_ready()
        gateway.process.send_signal(signal.SIGHUP)
        await until(lambda: any('"key file read"' in line for line in gateway.log), 10)
        keys.unlink()
        await until(lambda: any('"key file is wrong"' in line for line in gateway.log), 10)
        gateway.process.send_signal(signal.SIGHUP)
        await until(lambda: sum('"key file is wrong"' in line for line in gateway.log) == 2, 10)
        assert gateway.process.returncode is None


async def test_a_hangup_without_a_key_file_does_nothing(gateway: GatewayProcess) -> None:
    await gateway.is_ready()
    gateway.process.send_signal(signal.SIGHUP)
    await until(lambda: any('"no key file to read"' in line for line in gateway.log), 10)
    assert (await raw_request(gateway.port, chat_request()))[0] == 200


async def test_it_never_loads_torch_or_transformers(gateway: GatewayProcess) -> None:
    await gateway.is_ready()
    status, _, _ = await raw_request(gateway.port, chat_request())
    assert status == 200
    process = psutil.Process(gateway.process.pid)
    libraries = {mapping.path for mapping in process.memory_maps()}
    assert not any("torch" in path or "triton" in path for path in libraries)
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    assert soft >= min(65536, hard)  # for connections
    assert process.memory_info().rss < 250 << 20
