"""Answers of unknown length to HTTP/1.0, which knows no chunks: they end with their connection.

Proxies speak HTTP/1.0 to servers, nginx for one, unless they are told otherwise.
"""

from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle


class CloseDelimited:
    """An app around `app`: takes over the sending of answers that do not tell their length."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle
        self._has_length = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, partial(self._send, send))

    async def _send(self, send: Send, message: Message) -> None:
        is_start = message["type"] == "http.response.start"
        if is_start:
            self._has_length = any(name == b"content-length" for name, _ in message["headers"])
        if self._has_length:
            await send(message)
            return
        if self._cycle.flow.write_paused and not self._cycle.disconnected:
            await self._cycle.flow.drain()
        if not self._cycle.disconnected:
            self._write_head(message) if is_start else self._write_body(message)

    def _write_head(self, start: Message) -> None:
        self._cycle.response_started = True
        fields = [*self._cycle.default_headers, *start["headers"], (b"connection", b"close")]
        lines = b"".join(b"%b: %b\r\n" % field for field in fields)
        self._cycle.transport.write(b"%b%b\r\n" % (STATUS_LINE[start["status"]], lines))

    def _write_body(self, message: Message) -> None:
        self._cycle.transport.write(message["body"])
        if not message["more_body"]:
            self._cycle.response_complete = True
            self._cycle.message_event.set()
            self._cycle.transport.close()
            self._cycle.on_response()
