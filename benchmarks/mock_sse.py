"""An OpenAI server of no cost: every step brings one ready SSE event of every stream.

What stands behind peers that only pass events on. No event is made while it is measured.
"""

import asyncio
from typing import Any

EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion",'
    b'"created":1796000000,"model":"mock","choices":[{"index":0,"text":" w1234","logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
_CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_ABOUT = b'{"object":"list","data":[{"id":"mock","object":"model"}],"model_id":"mock"}'
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


class MockSse:
    """`step_s`: time between steps; 0: none. It may change while streams run."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._streams: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        """Returns its URL."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._steps = asyncio.create_task(self._step())
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._steps.cancel()
        self._server.close()
        for stream in self._streams:
            stream.transport.abort()

    async def _serve(self, reader: Any, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head: bytes = await reader.readuntil(b"\r\n\r\n")
                fields = [line.lower() for line in head.split(b"\r\n")]
                lengths = [int(f[15:]) for f in fields if f.startswith(b"content-length:")]
                await reader.readexactly(sum(lengths))
                if head.startswith(b"POST /v1/"):
                    writer.write(_STREAM)
                    self._streams.add(writer)
                else:
                    writer.write(_ANSWER % (len(_ABOUT), _ABOUT))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._streams.discard(writer)
            writer.close()

    async def _step(self) -> None:
        while True:
            for stream in self._streams:
                if stream.transport.get_write_buffer_size() == 0:
                    stream.write(_CHUNK)
            await asyncio.sleep(self.step_s or 0.001)
