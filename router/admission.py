"""The router's queue: bounded, by priority, then by arrival; who cannot be placed waits.

Requests of one *group* (same model, same kind of worker) are served strictly in order, so a large
request is never overtaken for ever by small ones. Groups do not wait for each other.
"""

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from paceline.core.errors import Overloaded, PacelineError

RETRY_AFTER_S = (1.0, 60.0)  # least and most that a refused caller is told to wait
_SMOOTHING = 0.1


class Placement(Protocol):
    def close(self) -> None:
        """Gives back what the placement holds."""


P = TypeVar("P", bound=Placement)
Order = tuple[int, int]  # priority, arrival


class _Waiter(Generic[P]):
    __slots__ = ("future", "num_tokens", "order", "place")

    def __init__(self, order: Order, place: Callable[[], P | None], num_tokens: int) -> None:
        self.order = order
        self.place = place
        self.num_tokens = num_tokens
        self.future: asyncio.Future[P] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: "_Waiter[P]") -> bool:
        return self.order < other.order


class AdmissionQueue(Generic[P]):
    """Bounded in requests and in the prompt tokens that they hold in memory."""

    def __init__(self, limit: int, token_limit: int) -> None:
        self.limit = limit
        self.token_limit = token_limit
        self._groups: dict[Hashable, list[_Waiter[P]]] = {}
        self._num_waiting = 0
        self._num_tokens = 0
        self._arrivals = itertools.count()
        self._placed_at: float | None = None
        self._interval_s = 0.05  # between placements, smoothed

    def __len__(self) -> int:
        return self._num_waiting

    def next_order(self, priority: int) -> Order:
        """A place in the line: keep it for later waits of the same request."""
        return priority, next(self._arrivals)

    def check_room(self, num_tokens: int) -> None:
        """Raises Overloaded when the queue is full. An empty queue takes a prompt of any length."""
        too_long = self._num_waiting and self._num_tokens + num_tokens > self.token_limit
        if self._num_waiting >= self.limit or too_long:
            waiting = f"{self._num_waiting} requests with {self._num_tokens} tokens are waiting"
            raise Overloaded(f"the queue is full: {waiting}", retry_after_s=self.retry_after_s())

    def retry_after_s(self) -> float:
        """When a place may be free: the queue's length at the present pace."""
        wait = math.ceil(self._num_waiting * self._interval_s)
        return float(min(max(wait, RETRY_AFTER_S[0]), RETRY_AFTER_S[1]))

    async def wait(
        self, group: Hashable, order: Order, place: Callable[[], P | None], num_tokens: int
    ) -> P:
        """What `place` returns once it is this request's turn and there is room.

        `place` returns None while there is none, and raises PacelineError to end the wait. The
        caller owns the result; one that arrives together with a cancellation is closed here.
        """
        waiter = _Waiter(order, place, num_tokens)
        heapq.heappush(self._groups.setdefault(group, []), waiter)
        self._num_waiting += 1
        self._num_tokens += num_tokens
        self._serve(group)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._leave(group, waiter)
            raise

    def wake(self) -> None:
        """Something changed: places all that can be placed now."""
        for group in list(self._groups):
            self._serve(group)

    def _serve(self, group: Hashable) -> None:
        waiters = self._groups.get(group, [])
        while waiters:
            if not self._settle(waiters[0]):
                return
            self._uncount(heapq.heappop(waiters))
        self._groups.pop(group, None)

    def _settle(self, waiter: _Waiter[P]) -> bool:
        """True when this one waits no longer: placed, refused, or gone."""
        if waiter.future.done():
            return True
        try:
            placement = waiter.place()
        except PacelineError as error:
            waiter.future.set_exception(error)
            return True
        if placement is None:
            return False
        waiter.future.set_result(placement)
        self._note_pace()
        return True

    def _leave(self, group: Hashable, waiter: _Waiter[P]) -> None:
        """Its task was cancelled: while it waited, or just after it was placed."""
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().close()
        waiters = self._groups.get(group, [])
        if waiter in waiters:
            waiters.remove(waiter)
            heapq.heapify(waiters)
            self._uncount(waiter)
        self._serve(group)  # it may have been the one that all waited for

    def _uncount(self, waiter: _Waiter[P]) -> None:
        self._num_waiting -= 1
        self._num_tokens -= waiter.num_tokens

    def _note_pace(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._placed_at is not None:
            interval = min(now - self._placed_at, 10.0)
            self._interval_s += _SMOOTHING * (interval - self._interval_s)
        self._placed_at = now
