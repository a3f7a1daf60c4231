"""Where the router's emissions for one response wait for the one task that writes it."""

import asyncio
from collections.abc import Callable

from paceline.core.errors import Overloaded
from paceline.v1.common_pb2 import Emission


class Mailbox:
    """Bounded: a client that lags `max_pending` emissions or `max_bytes` behind loses its request.

    Written by the router's reader, which it never blocks; read by one task. `on_overflow` frees
    that task if it is stuck in a write to the client. `take_now` may take an emission while the
    task waits for one: a token then costs neither a queue nor a wake.
    """

    __slots__ = (
        "_error",
        "_max_bytes",
        "_max_pending",
        "_num_bytes",
        "_on_overflow",
        "_pending",
        "_waiter",
        "take_now",
    )

    def __init__(self, max_pending: int, max_bytes: int, on_overflow: Callable[[], object]) -> None:
        self._max_pending = max_pending
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._on_overflow = on_overflow
        self._pending: list[Emission] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.take_now: Callable[[Emission], bool] = leave

    def deliver(self, emission: Emission) -> bool:
        """False: the reader lags too far behind and the request must be cancelled."""
        if self._is_awaited and self._taken_now(emission):
            return True
        num_bytes = self._num_bytes + emission.ByteSize()
        if len(self._pending) >= self._max_pending or num_bytes > self._max_bytes:
            self.fail(Overloaded("the client reads too slowly"), drop_pending=True)
            self._on_overflow()
            return False
        self._pending.append(emission)
        self._num_bytes = num_bytes
        self._wake()
        return True

    def fail(self, error: Exception, *, drop_pending: bool = False) -> None:
        """Ends the mailbox; the first error counts, after what is pending or instead of it."""
        if drop_pending:
            self._pending.clear()
            self._num_bytes = 0
        self._error = self._error or error
        self._wake()

    async def next(self) -> list[Emission]:
        """All pending emissions, at least one. Raises the error once nothing is pending."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken, self._pending = self._pending, []
        self._num_bytes = 0
        return taken

    @property
    def _is_awaited(self) -> bool:
        """Nothing is pending then, and nothing has failed."""
        return self._waiter is not None and not self._waiter.done()

    def _taken_now(self, emission: Emission) -> bool:
        try:
            return self.take_now(emission)
        except Exception as failure:  # of this one response: its task answers for it
            self.fail(failure)
            return True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def leave(emission: Emission) -> bool:
    """Takes nothing: all waits for the task."""
    return False
