"""uvicorn without its signal handlers, with connections that are bounded."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from paceline.gateway.config import GatewayConfig
from paceline.gateway.http_limits import CUT_S, http_limits
from paceline.gateway.http_protocol import BoundedProtocol
from paceline.gateway.ports import bind


class HttpServer:
    """Start, stop. Raises ConfigError naming a port that is taken."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._config = config
        self._socket = bind(config.host, config.port, is_shared=config.shares_ports)
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(_uvicorn_config(app, config))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http-server")
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Stops accepting, lets running answers end, cuts what remains after the drain timeout."""
        self._server.should_exit = True
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the gateway's main installs handlers, once for HTTP and gRPC


def _uvicorn_config(app: ASGIApp, config: GatewayConfig) -> uvicorn.Config:
    bounds = {"limits": http_limits(config.clients), "idle": {}}
    settings: dict[str, Any] = {
        "http": type("Protocol", (BoundedProtocol,), bounds),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": max(1, round(config.clients.keep_alive_s)),
        "timeout_graceful_shutdown": round(config.drain_timeout_s + CUT_S),
        "backlog": 2048,
    }
    return uvicorn.Config(app, **settings)
