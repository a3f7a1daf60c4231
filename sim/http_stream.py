"""Answers of an HTTP server as they arrive: a connection a request, which the server closes.

No HTTP library: at many streams its own cost would be in what is measured.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_PIECE_BYTES = 1 << 24
BROKEN = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)  # no answer, or a part


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    api_key: str = ""

    @asynccontextmanager
    async def exchange(
        self, path: str, body: bytes = b""
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Status, and pieces of the answer; POST if there is a body. Raises what is BROKEN."""
        parts = urlsplit(self.url)
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=is_tls or None)
        lines = [
            f"{'POST' if body else 'GET'} {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"host: {parts.netloc}",
            "connection: close",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "x-paceline-timing: 1",  # an event for each token, also when its text is incomplete
            *([f"authorization: Bearer {self.api_key}"] if self.api_key else []),
        ]
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            yield int(head[9:12]), _pieces(reader, b"transfer-encoding: chunked" in head)
        finally:
            writer.close()


async def _pieces(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    if not is_chunked:
        while piece := await reader.read(1 << 16):
            yield piece
        return
    while size := int((await reader.readuntil(b"\n")).partition(b";")[0], 16):
        if size > MAX_PIECE_BYTES:
            raise ValueError(f"a piece of {size} bytes")
        yield (await reader.readexactly(size + 2))[:-2]


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What stands after each `data:` of a stream."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
        if len(rest) > MAX_PIECE_BYTES:
            raise ValueError("a line without an end")


async def read_all(pieces: AsyncIterator[bytes]) -> bytes:
    """A short answer in one piece."""
    found = b""
    async for piece in pieces:
        found += piece
        if len(found) > MAX_PIECE_BYTES:
            raise ValueError("an answer without an end")
    return found
