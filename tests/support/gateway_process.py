"""A gateway as a process before a scripted router."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.fake_router_service import SECRET, FakeRouter
from tests.support.gateway_deployment import model_info
from tests.support.mock_model import write_mock_model
from tests.support.waits import until

_COMMAND = "import sys; from paceline.cli.main import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class GatewayProcess:
    process: asyncio.subprocess.Process
    router: FakeRouter
    port: int
    grpc_port: int
    log: list[str]

    async def is_ready(self) -> None:
        await until(lambda: any('"ready": true' in line for line in self.log), 10)


@asynccontextmanager
async def gateway_process(
    folder: Path, *arguments: str, listens: bool = True
) -> AsyncIterator[GatewayProcess]:
    """Listens, unless told otherwise; `arguments` are further ones of its command line. `folder`:
    for its model."""
    model = write_mock_model(folder)
    router = FakeRouter([model_info(model)])
    await router.start()
    own = ["gateway", "--model", str(model), "--router", router.endpoint]
    own += ["--port", "0", "--grpc-port", "0", *arguments]
    few_files = 'ulimit -S -n 256 && exec "$@"'
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        few_files,
        "sh",
        sys.executable,
        "-c",
        _COMMAND,
        *own,
        env={**os.environ, "PACELINE_GATEWAY_SECRET": SECRET},
        stderr=asyncio.subprocess.PIPE,
    )
    log: list[str] = []
    assert process.stderr is not None
    reader = asyncio.create_task(_read(process.stderr, log))
    try:
        ports = await _ports(log) if listens else (0, 0)
        yield GatewayProcess(process, router, *ports, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reader
        await router.stop()


async def _ports(log: list[str]) -> tuple[int, int]:
    """Of HTTP and gRPC, once it listens there."""
    await until(lambda: any('"listening"' in line for line in log), 20)
    listening = json.loads(next(line for line in log if '"listening"' in line))
    return listening["port"], listening["grpc_port"]


async def _read(stderr: asyncio.StreamReader, log: list[str]) -> None:
    async for line in stderr:
        log.append(line.decode())
