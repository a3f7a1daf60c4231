"""HTTP probes of a service: /livez, /readyz and /metrics, on a port of their own.

Small on purpose: GET of few fixed paths, one request a connection, everything bounded (header
bytes, connections, seconds). Of too many connections the one that waited longest makes room, so
that a probe can neither be starved nor starve its service.
"""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus

from prometheus_client import REGISTRY, CollectorRegistry

from paceline.core.errors import ConfigError
from paceline.rpc.exposition import exposition

MAX_HEADER_BYTES = 8192
MAX_CONNECTIONS = 256  # more than arrive at once: the backlog is 100
HEAD_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 5.0

Answer = tuple[HTTPStatus, str, bytes]
Page = Callable[[], bytes]


class ProbeServer:
    """Answers probes while the event loop lives.

    `reasons` is called for each /readyz and says why the service is not ready; ready when empty.
    `details` are shown beneath, ready or not.
    `registry` is what /metrics shows; the process-wide one by default. `pages` gives further paths
    the JSON that they show. `setting`: that of the port, for errors.
    """

    def __init__(
        self,
        host: str,
        port: int,
        reasons: Callable[[], list[str]],
        registry: CollectorRegistry | None = None,
        pages: Mapping[str, Page] | None = None,
        setting: str = "probe_port",
        details: Callable[[], list[str]] = list,
    ) -> None:
        self._host = host
        self._port = port
        self._reasons = reasons
        self._details = details
        self._registry = registry if registry is not None else REGISTRY
        self._pages = {path.encode(): page for path, page in (pages or {}).items()}
        self._setting = setting
        self._server: asyncio.Server | None = None
        self._waiting: dict[asyncio.Task[None], None] = {}  # for a request; the oldest first
        self._answering: dict[asyncio.Task[None], None] = {}

    async def start(self) -> int:
        """Binds and serves; returns the port. Raises ConfigError when the port is taken."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._port, limit=MAX_HEADER_BYTES
            )
        except OSError as error:
            reason = f"cannot be bound on {self._host}: {error.strerror or error}"
            raise ConfigError(self._setting, self._port, reason) from None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        connections = [*self._waiting, *self._answering]
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._make_room()
        self._waiting[task] = None
        writer.transport.set_write_buffer_limits(0)  # drain() until all is sent
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                head = await _read_head(reader)
            self._waiting.pop(task)
            self._answering[task] = None
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._respond(head, writer)
        except (TimeoutError, OSError, EOFError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._waiting.pop(task, None)
            self._answering.pop(task, None)
            writer.close()

    def _make_room(self) -> None:
        if len(self._waiting) + len(self._answering) < MAX_CONNECTIONS:
            return
        connections = self._waiting or self._answering
        oldest = next(iter(connections))
        del connections[oldest]
        oldest.cancel()

    async def _respond(self, head: bytes | None, writer: asyncio.StreamWriter) -> None:
        if head is None:
            answer = _text(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "header too large")
        else:
            answer = await self._answer(head)
        status, content_type, body = answer
        writer.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        )
        if head is None or not head.startswith(b"HEAD "):
            writer.write(body)
        await writer.drain()

    async def _answer(self, head: bytes) -> Answer:
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return _text(HTTPStatus.BAD_REQUEST, "not an HTTP/1 request")
        if parts[0] not in (b"GET", b"HEAD"):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "GET only")
        path = parts[1].split(b"?", 1)[0]
        if path == b"/livez":
            return _text(HTTPStatus.OK, "ok")
        if path == b"/readyz":
            reasons = self._reasons()
            status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
            return _text(status, "\n".join([*(reasons or ["ok"]), *self._details()]))
        if path == b"/metrics":
            accept = _header(head, b"accept")
            return HTTPStatus.OK, *await asyncio.to_thread(exposition, self._registry, accept)
        if page := self._pages.get(path):
            return HTTPStatus.OK, "application/json", page()
        return _text(HTTPStatus.NOT_FOUND, "not found")


async def _read_head(reader: asyncio.StreamReader) -> bytes | None:
    """None if it is too large."""
    try:
        head = await reader.readexactly(3)
        if head.isalpha():  # else it is no method: nothing to wait for
            head += await reader.readuntil(b"\r\n\r\n")
        return head
    except asyncio.LimitOverrunError:
        return None


def _header(head: bytes, name: bytes) -> str:
    """Of a request; empty: it has none."""
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.decode("latin-1")
    return ""


def _text(status: HTTPStatus, text: str) -> Answer:
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"
