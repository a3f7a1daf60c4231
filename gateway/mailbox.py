"""Where the router's emissions for one response wait for the one task that writes it."""

import asyncio
from collections.abc import Callable

from paceline.core.errors import Overloaded, PacelineError
from paceline.v1.common_pb2 import Emission


class Mailbox:
    """Bounded: a client that lags `max_pending` emissions behind loses its request.

    Written by the router's reader, which it never blocks; read by one task. `on_overflow` frees
    that task if it is stuck in a write to the client.
    """

    __slots__ = ("_error", "_max_pending", "_on_overflow", "_pending", "_waiter")

    def __init__(self, max_pending: int, on_overflow: Callable[[], object]) -> None:
        self._max_pending = max_pending
        self._on_overflow = on_overflow
        self._pending: list[Emission] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: PacelineError | None = None

    def deliver(self, emission: Emission) -> bool:
        """False: the reader lags too far behind and the request must be cancelled."""
        if len(self._pending) >= self._max_pending:
            self.fail(Overloaded("the client reads too slowly"), drop_pending=True)
            self._on_overflow()
            return False
        self._pending.append(emission)
        self._wake()
        return True

    def fail(self, error: PacelineError, *, drop_pending: bool = False) -> None:
        """Ends the mailbox; the first error counts, after what is pending or instead of it."""
        if drop_pending:
            self._pending.clear()
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
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
