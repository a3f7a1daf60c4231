"""The gateway as a process: starts without torch, drains on SIGTERM, exits 0."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.fake_router_service import SECRET, FakeRouter, bytes_reply
from tests.support.gateway_client import raw_request, request_bytes, until
from tests.support.gateway_deployment import model_info
from tests.support.mock_model import write_mock_model

_COMMAND = "import sys; from paceline.cli.main import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class GatewayProcess:
    process: asyncio.subprocess.Process
    router: FakeRouter
    port: int
    log: list[str]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    folder = write_mock_model(tmp_path)
    router = FakeRouter([model_info(folder)])
    await router.start()
    arguments = ["gateway", "--model", str(folder), "--router", router.endpoint]
    arguments += ["--port", "0", "--grpc-port", "0", "--drain-timeout-s", "5"]
    few_files = 'ulimit -S -n 256 && exec "$@"'
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        few_files,
        "sh",
        sys.executable,
        "-c",
        _COMMAND,
        *arguments,
        env={**os.environ, "PACELINE_GATEWAY_SECRET": SECRET},
        stderr=asyncio.subprocess.PIPE,
    )
    log: list[str] = []
    assert process.stderr is not None
    reader = asyncio.create_task(_read(process.stderr, log))
    await until(lambda: any('"listening"' in line for line in log), 20)
    listening = next(line for line in log if '"listening"' in line)
    yield GatewayProcess(process, router, json.loads(listening)["port"], log)
    if process.returncode is None:
        process.kill()
    await process.wait()
    await reader
    await router.stop()


async def _read(stderr: asyncio.StreamReader, log: list[str]) -> None:
    async for line in stderr:
        log.append(line.decode())


def chat_request(**fields: object) -> bytes:
    messages = [{"role": "user", "content": "Hi"}]
    body = json.dumps({"model": "mock", "messages": messages, **fields}).encode()
    return request_bytes("/v1/chat/completions", body)


async def test_it_drains_a_running_stream_and_exits_0(gateway: GatewayProcess) -> None:
    await until(lambda: any('"ready": true' in line for line in gateway.log), 10)
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


async def test_it_never_loads_torch_or_transformers(gateway: GatewayProcess) -> None:
    await until(lambda: any('"ready": true' in line for line in gateway.log), 10)
    status, _, _ = await raw_request(gateway.port, chat_request())
    assert status == 200
    process = psutil.Process(gateway.process.pid)
    libraries = {mapping.path for mapping in process.memory_maps()}
    assert not any("torch" in path or "triton" in path for path in libraries)
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    assert soft >= min(65536, hard)  # for connections
    assert process.memory_info().rss < 250 << 20
