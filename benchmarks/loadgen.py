"""Sends completions over raw sockets and notes when each piece of the answer arrives.

No HTTP library: with 32 streams in step its own cost would be in the figure. While an answer
arrives its bytes are only kept with their times; `benchmarks.answer` reads them when it is over.
Times are of the wall clock, because they are compared with the worker's.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson

from benchmarks.answer import Answer, Piece, read_answer

TIMING = {"x-paceline-timing": "1"}  # asks for emission times and token ids in each event


@dataclass(frozen=True, slots=True)
class Call:
    """One request. The client may hang up some time after sending it, or with some event."""

    body: Mapping[str, Any]
    path: str = "/v1/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    leave_after_s: float | None = None
    leave_after_pieces: int | None = None  # reads from the socket, about one an event
    timeout_s: float = 300.0

    def encode(self, host: str) -> bytes:
        content = orjson.dumps(self.body)
        lines = [f"POST {self.path} HTTP/1.1", f"host: {host}", "content-type: application/json"]
        lines += [f"content-length: {len(content)}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + content


class _Exchange(asyncio.Protocol):
    """One request on one connection, which the server closes after its answer."""

    def __init__(self, request: bytes, max_pieces: int | None) -> None:
        self.has_left = False
        self.pieces: list[Piece] = []
        self.sent_at = 0.0
        self.over = asyncio.get_running_loop().create_future()
        self._request = request
        self._max_pieces = max_pieces
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.sent_at = time.time()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.time(), data))
        if len(self.pieces) == self._max_pieces:
            self.leave()

    def leave(self) -> None:
        """Hangs up, unless the server has."""
        self.has_left = not self.over.done()
        assert self._transport is not None
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def send(base_url: str, call: Call) -> Answer:
    """Sends one request; what came back, also when that is an error or nothing."""
    address = urlsplit(base_url)
    request = call.encode(address.netloc)
    loop = asyncio.get_running_loop()
    try:
        _, exchange = await loop.create_connection(
            lambda: _Exchange(request, call.leave_after_pieces),
            address.hostname or "",
            address.port or 80,
        )
    except OSError as error:
        return Answer(time.time(), error=f"no connection: {error}")
    wait_s = call.timeout_s if call.leave_after_s is None else call.leave_after_s
    await asyncio.wait([exchange.over], timeout=wait_s)
    is_late = not exchange.over.done()
    if is_late:
        exchange.leave()
    reason = f"no end after {wait_s:g} s" if is_late and call.leave_after_s is None else ""
    return read_answer(exchange.sent_at, exchange.pieces, has_left=exchange.has_left, error=reason)


async def send_all(base_url: str, calls: list[Call], at_once: int) -> list[Answer]:
    """Answers in the order of `calls`, never more than `at_once` of them open."""
    gate = asyncio.Semaphore(at_once)

    async def one(call: Call) -> Answer:
        async with gate:
            return await send(base_url, call)

    return list(await asyncio.gather(*map(one, calls)))
