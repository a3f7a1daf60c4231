"""uvicorn without its signal handlers, with bounds on the head of a request."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.core.errors import ConfigError
from paceline.gateway.config import GatewayConfig

_MAX_HEAD_BYTES = 64 << 10
_MAX_CONNECTIONS_FACTOR = 4  # idle keep-alive connections beside the running requests


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections whose head is too large or too slow; lets an app abort a connection."""

    _read_timeout_s = 30.0
    _num_head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tools = {
            "abort": transport.abort,
            "can_write": self.can_write,
            "write_chunk": self.write_chunk,
        }
        self.app_state = {**self.app_state, **tools}
        self._head_timer = self.loop.call_later(self._read_timeout_s, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._num_head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._read_timeout_s, self.transport.abort)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def can_write(self) -> bool:
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_chunk(self, body: bytes) -> bool:
        """One chunk of a streamed body, as `send` would write it: a third of its cost a token.

        False if the connection takes none now: `send` then waits or drops it.
        """
        if not self.can_write():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            self.transport.abort()
            raise ValueError("request head too large")  # ends the parser, too

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class HttpServer:
    """Start, stop. Raises ConfigError naming a port that is taken."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._config = config
        self._socket = bind(config.host, config.port)
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
        """Stops accepting, lets running answers end within the drain timeout, cuts the rest."""
        self._server.should_exit = True
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the gateway's main installs handlers, once for HTTP and gRPC


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError("port", port, f"cannot listen on {host}: {error.strerror}") from error
    return bound


def _uvicorn_config(app: ASGIApp, config: GatewayConfig) -> uvicorn.Config:
    settings: dict[str, Any] = {
        "http": type("Protocol", (BoundedProtocol,), {"_read_timeout_s": config.read_timeout_s}),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "timeout_keep_alive": max(1, round(config.keep_alive_s)),
        "timeout_graceful_shutdown": max(1, round(config.drain_timeout_s)),
        "limit_concurrency": _MAX_CONNECTIONS_FACTOR * config.max_concurrent_requests,
        "backlog": 2048,
    }
    return uvicorn.Config(app, **settings)
