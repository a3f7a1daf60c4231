"""One HTTP connection of uvicorn, with a bound on every wait and an answer to every refusal.

    idle ── first byte ── head ── body ── answer ── idle
      keep-alive   read timer      app      write timer

A connection that owes us bytes has a timer that further bytes do not renew. One that takes none of
its answer has a timer that only progress renews. Of too many connections the longest idle is cut.
At shutdown a request whose body is not here yet is refused after a second. While a request waits
behind a running one nothing is read: the kernel is asked whether the client is still there.
"""

import asyncio
import socket
from http import HTTPStatus
from typing import Any

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from paceline.core.errors import ErrorCode
from paceline.gateway.errors import body_of
from paceline.gateway.http_1_0 import CloseDelimited
from paceline.gateway.http_limits import (
    LINGER_S,
    MAX_FIELDS,
    MAX_HEAD_BYTES,
    PEER_CHECK_S,
    PIECE_BYTES,
    SHUTDOWN_BODY_S,
    HttpLimits,
)

_TCP_ESTABLISHED = 1  # of the kernel's states of a connection


class Refusal(Exception):
    """Raised inside the parser; becomes the answer, after which the connection is closed."""

    def __init__(
        self, status: HTTPStatus, message: str, code: ErrorCode = ErrorCode.INVALID_REQUEST
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class BoundedProtocol(HttpToolsProtocol):
    """A server makes a subclass with its limits; `idle` is shared by all its connections.

    It extends uvicorn's own protocol class, whose inside is no public interface: pyproject.toml
    admits the one minor version that this is tested with."""

    limits: HttpLimits
    idle: "dict[BoundedProtocol, None]"  # longest idle first

    _read_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _peer_timer: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None  # `cycle` is the last one that came
    _num_unsent_bytes = 0  # when the write timer was started
    _num_head_bytes = 0  # received since the last progress
    _has_progress = False  # in what is being parsed: bytes of a body, or its end
    _is_deaf = False  # refused: what still comes is thrown away
    _plain_head = b""  # of a request that asks for another protocol, without that wish

    # --- the connection ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tools = {
            "abort": transport.abort,
            "can_write": self.can_write,
            "write_chunk": self.write_chunk,
        }
        self.app_state = {**self.app_state, **tools}
        self.idle[self] = None
        self._start_read_timer()
        if len(self.connections) > self.limits.max_connections:
            longest_idle = next(iter(self.idle))
            del self.idle[longest_idle]
            longest_idle.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.pop(self, None)
        self._stop_read_timer()
        self._stop_write_timer()
        if self._peer_timer is not None:
            self._peer_timer.cancel()
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_deaf:
            return
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            invalid = Refusal(HTTPStatus.BAD_REQUEST, "Invalid HTTP request.")
            self._refuse(cause if isinstance(cause, Refusal) else invalid)
        if not self._is_deaf and self._is_answered():
            self._start_read_timer()

    def _parse(self, data: bytes) -> None:
        """Raises HttpParserError. A wish for another protocol is ignored, as RFC 9110 allows."""
        rest = memoryview(data)
        while rest and not self._is_deaf:
            num_bytes = len(rest[:PIECE_BYTES])
            self._has_progress = False
            try:
                self.parser.feed_data(rest[:num_bytes])
            except httptools.HttpParserUpgrade as upgrade:
                num_bytes = upgrade.args[0]
                self.parser.feed_data(self._plain_head)
            rest = rest[num_bytes:]
            self._num_head_bytes = 0 if self._has_progress else self._num_head_bytes + num_bytes
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large(f"{MAX_HEAD_BYTES} bytes"))

    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    # --- what the parser finds ---

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_FIELDS:
            raise _head_too_large(f"{MAX_FIELDS} fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # the parser takes the body for another protocol's
            self._plain_head = self._head_without_upgrade()
            return
        if self.parser.get_http_version() != "1.1":
            if any(name == b"transfer-encoding" for name, _ in self.headers):
                raise Refusal(HTTPStatus.BAD_REQUEST, "HTTP/1.0 knows no Transfer-Encoding.")
            self.scope["state"]["write_chunk"] = self.write_plain
        self._stop_read_timer()
        self.idle.pop(self, None)
        super().on_headers_complete()
        if self.pipeline and self._peer_timer is None:
            self._peer_timer = self.loop.call_later(PEER_CHECK_S, self._check_peer)

    def on_body(self, body: bytes) -> None:
        self._has_progress = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._has_progress = True
            super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise Refusal(HTTPStatus.BAD_REQUEST, "This server is no proxy.")
        version = self.parser.get_http_version().encode()
        kept = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(kept))

    # --- answers ---

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] != "1.1":
            app = CloseDelimited(app, cycle)
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_write_timer()
        if self._is_answered() and not self.transport.is_closing():
            self.idle[self] = None

    def can_write(self) -> bool:
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_chunk(self, body: bytes) -> bool:
        """One chunk of a streamed body, as `send` would write it: a third of its cost a token.

        False if the connection takes none now: `send` then waits or drops it.
        """
        return self.write_plain(b"%x\r\n%b\r\n" % (len(body), body))

    def write_plain(self, body: bytes) -> bool:
        """The same for a body that ends with its connection."""
        if not self.can_write():
            return False
        self.transport.write(body)
        return True

    def _refuse(self, refusal: Refusal) -> None:
        """Answers and closes: at once, or behind what came before on this connection."""
        self._is_deaf = True
        self._stop_read_timer()
        cycle = self.cycle
        if not self._is_answered():
            if self.pipeline and cycle.more_body:  # it waits, and its body is what is refused
                self.pipeline[0] = (cycle, _answer(refusal))  # type: ignore[assignment]
                return
            if self.pipeline or cycle.response_started or not cycle.more_body:
                cycle.keep_alive = False
                return
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(_raw(_answer(refusal)))
        self.transport.write_eof()
        self._read_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def shutdown(self) -> None:
        super().shutdown()
        if not self._is_answered() and self.cycle.more_body and self._read_timer is None:
            self._read_timer = self.loop.call_later(SHUTDOWN_BODY_S, self._refuse_body)

    def _refuse_body(self) -> None:
        """Nothing of this request has run yet."""
        self._read_timer = None
        if not self._is_answered() and self.cycle.more_body:
            message = "The server is shutting down."
            status = HTTPStatus.SERVICE_UNAVAILABLE
            self._refuse(Refusal(status, message, ErrorCode.UNAVAILABLE))

    # --- timers ---

    def _start_read_timer(self) -> None:
        if self._read_timer is None:
            timeout_s = self.limits.read_timeout_s
            self._read_timer = self.loop.call_later(timeout_s, self.transport.abort)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _check_peer(self) -> None:
        """Its end of the connection may stand behind bytes that are not read yet."""
        self._peer_timer = None
        if not self.pipeline or self.transport.is_closing():
            return
        connection: socket.socket = self.transport.get_extra_info("socket")
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state != _TCP_ESTABLISHED:
            self.transport.abort()
        else:
            self._peer_timer = self.loop.call_later(PEER_CHECK_S, self._check_peer)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()
        self._start_write_timer()

    def _start_write_timer(self) -> None:
        """Runs while anything is unsent; the transport's own close() would wait for ever."""
        num_unsent_bytes = self.transport.get_write_buffer_size()
        if num_unsent_bytes and self._write_timer is None:
            self._num_unsent_bytes = num_unsent_bytes
            timeout_s = self.limits.read_timeout_s
            self._write_timer = self.loop.call_later(timeout_s, self._check_progress)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_progress(self) -> None:
        self._write_timer = None
        if self.transport.get_write_buffer_size() >= self._num_unsent_bytes:
            self.transport.abort()
        else:
            self._start_write_timer()


def _head_too_large(limit: str) -> Refusal:
    message = f"The request's head exceeds {limit}."
    return Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)


def _answer(refusal: Refusal) -> Response:
    body = body_of(refusal.status, refusal.message, None, refusal.code.value)
    headers = {"connection": "close"}
    if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["retry-after"] = "1"
    return Response(body, refusal.status, headers, "application/json")


def _raw(answer: Response) -> bytes:
    """For a request that no app will see."""
    head = b"".join(b"%b: %b\r\n" % field for field in answer.raw_headers)
    return b"%b%b\r\n%b" % (STATUS_LINE[answer.status_code], head, bytes(answer.body))
