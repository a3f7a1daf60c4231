"""A request and its answer on one connection: errors, streams, and a client that leaves.

Until the first token nothing is sent, so that any failure before it has its own HTTP status. After
it, a failure is one SSE frame with the error, then [DONE]. A watcher ends the work as soon as the
client leaves, streaming or not.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from paceline.core.errors import Cancelled, PacelineError
from paceline.gateway.answer import SSE_DONE
from paceline.gateway.body import decode, discard_body, read_body
from paceline.gateway.choice import Choice, Delta
from paceline.gateway.deadline import Deadline
from paceline.gateway.errors import BodyTooLarge, BodyTooSlow, error_body, http_error
from paceline.gateway.generation import Generation
from paceline.gateway.heartbeat import heartbeat
from paceline.gateway.http_limits import LINGER_S, MAX_DISCARD_BYTES
from paceline.gateway.openai_types import Body
from paceline.gateway.prepared import PreparedRequest
from paceline.gateway.replies import caller_id_header, send_body, send_start
from paceline.gateway.serving import Serving
from paceline.gateway.statistics import server_timing
from paceline.gateway.tenants import Tenant

T = TypeVar("T")
B = TypeVar("B", bound=Body)


class Exchange:
    """Read, then run; `fail` with whatever was raised."""

    def __init__(
        self, serving: Serving, scope: Scope, receive: Receive, send: Send, deadline: Deadline
    ) -> None:
        self._serving = serving
        self.deadline = deadline
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_started = False
        self._gone: Cancelled | None = None  # the client left
        self._generation: Generation | None = None  # None while the request is prepared
        tools = scope["state"]  # of BoundedProtocol and Guard
        self.tenant: Tenant = tools["tenant"]
        self._abort: Callable[[], None] = tools["abort"]
        self._write_chunk: Callable[[bytes], bool] = tools["write_chunk"]
        self._can_write: Callable[[], bool] = tools["can_write"]

    def header(self, name: bytes) -> bytes | None:
        for key, value in self._scope["headers"]:
            if key == name:
                return bytes(value)
        return None

    @property
    def traceparent(self) -> str:
        """The caller's, unchecked."""
        return (self.header(b"traceparent") or b"").decode("latin-1")

    async def read(self, decoder: "msgspec.json.Decoder[B]") -> B:
        """The body. Raises InvalidRequest, or Cancelled when the client leaves."""
        limits = self._serving.http_limits
        timeout_s = min(limits.read_timeout_s, self.deadline.left_s())
        body = await read_body(self._scope, self._receive, limits.max_body_bytes, timeout_s)
        return decode(decoder, body)

    async def run(self, work: Awaitable[T], answer: Callable[[T], Awaitable[None]]) -> None:
        """Answers with what `work` returns. Raises PacelineError; Cancelled when the client
        leaves."""
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._watch(task), name="disconnect-watcher")
        try:
            async with self.deadline.kept():
                made = await work
            await answer(made)
        except asyncio.CancelledError:
            if self._gone is None or self._generation is not None:
                raise  # it was not the watcher
            task.uncancel()
            raise self._gone from None
        finally:
            watcher.cancel()

    async def generate(self, prepared: PreparedRequest) -> None:
        """The answer of a router."""
        caller = prepared.caller
        with self._serving.generation(
            prepared.model,
            caller.tenant,
            self._abort,
            self.deadline,
            caller.origin,
            has_statistics=caller.has_statistics,
        ) as generation:
            self._generation = generation
            generation.submit(prepared.jobs)
            if prepared.is_stream:
                interval_s = self._serving.config.clients.heartbeat_s
                with heartbeat(interval_s, lambda: generation.num_output_tokens, self._beat):
                    await self._stream(prepared, generation)
            else:
                await self._whole(prepared, generation)

    async def reply(self, body: bytes) -> None:
        """An answer of JSON in one piece."""
        await send_start(self._send, 200, self._headers(), len(body))
        await send_body(self._send, body, more=False)

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
            await discard_body(self._receive, MAX_DISCARD_BYTES, LINGER_S)
            await send_body(self._send, b"", more=False)

    async def _stream(self, prepared: PreparedRequest, generation: Generation) -> None:
        """One write a step, where its tokens arrive. The status goes out with the first token."""
        answer = prepared.answer

        def show(choice: Choice, delta: Delta) -> None:
            if frames := answer.frames(choice, delta):
                self._write_chunk(frames)

        generation.show_at_once(self._can_write_now, show)
        while not generation.done:
            deltas = await generation.step()
            frames = [answer.frames(*item) for item in deltas]
            if all(delta.prompt_logprobs is not None for _, delta in deltas):
                continue  # collected: an answer begins with its first token
            if not self._is_started:
                self._is_started = True
                await send_start(self._send, 200, self._headers(), None)
            if generation.done:
                frames.append(answer.end(generation))
            body = b"".join(frames)
            if generation.done or (body and not self._write_chunk(body)):
                await send_body(self._send, body, more=not generation.done)

    def _beat(self, comment: bytes) -> None:
        if self._can_write_now():
            self._write_chunk(comment)

    def _can_write_now(self) -> bool:
        return self._is_started and self._can_write()

    async def _whole(self, prepared: PreparedRequest, generation: Generation) -> None:
        while not generation.done:
            for choice, delta in await generation.step():
                prepared.answer.collect(choice, delta)
        await self.reply(prepared.answer.whole(generation))

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
        headers = [caller_id_header(self.header(b"x-request-id"))]
        if self._generation is not None and (statistics := self._generation.statistics):
            headers.append((b"server-timing", server_timing(statistics)))
        return headers
