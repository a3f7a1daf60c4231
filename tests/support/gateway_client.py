"""Raw-socket HTTP, for tests that look at bytes and at what arrives when."""

import asyncio
import json
from typing import Any


def request_bytes(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: test", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def raw_request(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and whole body of one exchange; the connection is closed afterwards."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode()
        status_line, *lines = head.strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return int(status_line.split()[1]), headers, body
    finally:
        writer.close()


def sse_events(text: str) -> list[Any]:
    """Decoded data of each frame; "[DONE]" stays a string."""
    events: list[Any] = []
    for frame in text.split("\n\n"):
        if frame:
            assert frame.startswith("data: "), frame
            data = frame[len("data: ") :]
            events.append(data if data == "[DONE]" else json.loads(data))
    return events
