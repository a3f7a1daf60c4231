"""Calls that wait for their caller: bounded in time and number, and ended when the server stops.

Of too many that wait for their message the one that waits longest is ended: a message comes with
its call, so who waits has none, and others are not kept out.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from paceline.core.errors import InvalidRequest, Overloaded, Unavailable

FIRST_MESSAGE_S = 10.0
MAX_WAITING_CALLS = 1024  # for their message
MAX_FOREIGN_CALLS = 1024  # of health and reflection, which may stay open for ever
_RETRY_AFTER_S = 1.0
_LONG_AGO = 0.0  # by the clock of an event loop


class OpenCalls:
    """Of one server. `stop` ends at once what only waits."""

    def __init__(self, first_message_s: float = FIRST_MESSAGE_S) -> None:
        self._first_message_s = first_message_s
        self._waits: set[asyncio.Timeout] = set()
        self._first_waits: dict[asyncio.Timeout, None] = {}  # longest first
        self._is_stopping = False
        self._num_foreign = 0

    async def first_message(self, context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
        """The one message of a call, which may never come. Raises InvalidRequest, Overloaded when
        too many wait, or Unavailable when the server stops."""
        try:
            async with self._waiting(self._first_message_s) as wait:
                with self._in_line(wait):
                    raw = await context.read()
        except TimeoutError:
            if wait.when() == _LONG_AGO:
                message = f"more than {MAX_WAITING_CALLS} calls wait for their message"
                raise Overloaded(message, retry_after_s=_RETRY_AFTER_S) from None
            reason = f"did not arrive within {self._first_message_s:g} s"
            raise InvalidRequest("request", "no message", reason) from None
        if not isinstance(raw, bytes):
            raise InvalidRequest("request", "no message", "the caller sent none")
        return raw

    @asynccontextmanager
    async def foreign(self) -> AsyncIterator[None]:
        """A call of a service that is not ours. Raises Overloaded at the bound, and Unavailable
        when the server stops."""
        if self._num_foreign >= MAX_FOREIGN_CALLS:
            message = f"{MAX_FOREIGN_CALLS} calls of this kind are open"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S)
        self._num_foreign += 1
        try:
            async with self._waiting(None):
                yield
        finally:
            self._num_foreign -= 1

    def stop(self) -> None:
        self._is_stopping = True
        for wait in list(self._waits):
            if not wait.expired():
                wait.reschedule(_LONG_AGO)

    @asynccontextmanager
    async def _waiting(self, timeout_s: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Raises TimeoutError, or Unavailable when the server stops."""
        try:
            async with asyncio.timeout(0 if self._is_stopping else timeout_s) as wait:
                with self._listed(wait):
                    yield wait
        except TimeoutError:
            if self._is_stopping:
                message = "the server is shutting down"
                raise Unavailable(message, retry_after_s=_RETRY_AFTER_S) from None
            raise

    @contextmanager
    def _in_line(self, wait: asyncio.Timeout) -> Iterator[None]:
        """At the bound the first in line is ended."""
        self._first_waits[wait] = None
        if len(self._first_waits) > MAX_WAITING_CALLS:
            first = next(iter(self._first_waits))
            del self._first_waits[first]
            if not first.expired():  # it is on its way out by itself
                first.reschedule(_LONG_AGO)
        try:
            yield
        finally:
            self._first_waits.pop(wait, None)

    @contextmanager
    def _listed(self, wait: asyncio.Timeout) -> Iterator[None]:
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)
