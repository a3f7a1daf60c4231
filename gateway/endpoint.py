"""One POST endpoint as a plain ASGI app: body in, answer or stream out, whoever ends first.

Until the first token nothing is sent, so that any failure before it has its own HTTP status. After
it, a failure is one SSE frame with the error, then [DONE]. A watcher ends the generation as soon as
the client leaves, streaming or not.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from paceline.core.errors import Cancelled, EngineFailure, PacelineError
from paceline.gateway.answer import SSE_DONE
from paceline.gateway.body import decode, discard_body, read_body
from paceline.gateway.choice import Choice, Delta
from paceline.gateway.deadline import Deadline
from paceline.gateway.errors import BodyTooLarge, BodyTooSlow, error_body, http_error
from paceline.gateway.generation import Generation
from paceline.gateway.openai_types import SamplingFields
from paceline.gateway.prepared import PreparedRequest
from paceline.gateway.replies import caller_id_header, send_body, send_start
from paceline.gateway.serving import Serving

R_contra = TypeVar("R_contra", bound=SamplingFields, contravariant=True)
R = TypeVar("R", bound=SamplingFields)

_DISCARD_BYTES, _DISCARD_S = 64 << 20, 2.0
logger = structlog.stdlib.get_logger("paceline.gateway")


class Prepare(Protocol[R_contra]):
    """What an API does with a decoded body."""

    def __call__(
        self, serving: Serving, request: R_contra, *, has_timing: bool
    ) -> Awaitable[PreparedRequest]: ...


class Endpoint:
    """An instance, not a function: Starlette then passes scope, receive and send through."""

    def __init__(
        self, serving: Serving, decoder: "msgspec.json.Decoder[R]", prepare: "Prepare[R]"
    ) -> None:
        self._serving = serving
        self._decoder = decoder
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = Deadline(self._serving.config.request_timeout_s)
        exchange = Exchange(self._serving, scope, receive, send, deadline)
        try:
            with self._serving.admitted():
                request = await self._read(scope, receive, deadline)
                has_timing = exchange.header(b"x-paceline-timing") is not None
                await exchange.run(self._prepare(self._serving, request, has_timing=has_timing))  # type: ignore[arg-type]
        except PacelineError as error:
            await exchange.fail(error)
        except Exception:  # the edge of the process: the caller gets no traceback
            logger.exception("request_failed")
            await exchange.fail(EngineFailure("internal error"))

    async def _read(self, scope: Scope, receive: Receive, deadline: Deadline) -> SamplingFields:
        config = self._serving.config
        timeout_s = min(config.read_timeout_s, deadline.left_s())
        body = await read_body(scope, receive, config.max_body_bytes, timeout_s)
        return decode(self._decoder, body)


class Exchange:
    """A request and its answer on one connection."""

    def __init__(
        self, serving: Serving, scope: Scope, receive: Receive, send: Send, deadline: Deadline
    ) -> None:
        self._serving = serving
        self._deadline = deadline
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_started = False
        self._gone: Cancelled | None = None  # the client left
        self._generation: Generation | None = None  # None while the request is prepared
        tools = scope["state"]  # of BoundedProtocol
        self._abort: Callable[[], None] = tools["abort"]
        self._write_chunk: Callable[[bytes], bool] = tools["write_chunk"]
        self._can_write: Callable[[], bool] = tools["can_write"]

    def header(self, name: bytes) -> bytes | None:
        for key, value in self._scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    async def run(self, preparation: Awaitable[PreparedRequest]) -> None:
        """Raises PacelineError; Cancelled when the client leaves."""
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._watch(task), name="disconnect-watcher")
        try:
            prepared = await self._until_left(task, preparation)
            await self._answer(prepared)
        finally:
            watcher.cancel()

    async def _until_left(
        self, exchange: "asyncio.Task[None]", preparation: Awaitable[PreparedRequest]
    ) -> PreparedRequest:
        try:
            async with self._deadline.kept():
                return await preparation
        except asyncio.CancelledError:
            if self._gone is None:
                raise
            exchange.uncancel()
            raise self._gone from None

    async def _answer(self, prepared: PreparedRequest) -> None:
        generation = self._serving.generation(prepared.model, self._abort, self._deadline)
        self._generation = generation
        try:
            generation.submit(prepared.jobs)
            await (self._stream if prepared.is_stream else self._whole)(prepared, generation)
        finally:
            generation.close()

    async def fail(self, error: PacelineError) -> None:
        """The error as an answer, or as the last frame of a stream that has begun."""
        self._serving.metrics.errors.labels(error.code.value).inc()
        if self._is_started:
            frames = b"data: " + error_body(error) + b"\n\n" + SSE_DONE
            await send_body(self._send, frames, more=False)
            return
        answer = http_error(error)
        is_unread = isinstance(error, BodyTooLarge | BodyTooSlow)
        headers = self._headers() + [(k.encode(), v.encode()) for k, v in answer.headers.items()]
        if is_unread:
            headers.append((b"connection", b"close"))
        await send_start(self._send, answer.status, headers, len(answer.body))
        await send_body(self._send, answer.body, more=is_unread)
        if is_unread:
            await discard_body(self._receive, _DISCARD_BYTES, _DISCARD_S)
            await send_body(self._send, b"", more=False)

    async def _stream(self, prepared: PreparedRequest, generation: Generation) -> None:
        """One write a step, where its tokens arrive. The status goes out with the first token."""
        answer = prepared.answer

        def show(choice: Choice, delta: Delta) -> None:
            if frames := answer.frames(choice, delta):
                self._write_chunk(frames)

        generation.show_at_once(self._can_write_now, show)
        while not generation.done:
            frames = [answer.frames(*item) for item in await generation.step()]
            if not self._is_started:
                self._is_started = True
                await send_start(self._send, 200, self._headers(), None)
            if generation.done:
                frames.append(answer.end(generation))
            body = b"".join(frames)
            if generation.done or (body and not self._write_chunk(body)):
                await send_body(self._send, body, more=not generation.done)

    def _can_write_now(self) -> bool:
        return self._is_started and self._can_write()

    async def _whole(self, prepared: PreparedRequest, generation: Generation) -> None:
        while not generation.done:
            for choice, delta in await generation.step():
                prepared.answer.collect(choice, delta)
        body = prepared.answer.whole(generation)
        await send_start(self._send, 200, self._headers(), len(body))
        await send_body(self._send, body, more=False)

    async def _watch(self, exchange: "asyncio.Task[None]") -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._generation is not None and self._generation.done:
            return
        self._serving.metrics.disconnects.inc()
        self._gone = Cancelled("the client left")
        if self._generation is None:
            exchange.cancel()
        else:
            self._generation.fail(self._gone)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        return [caller_id_header(self.header(b"x-request-id"))]
