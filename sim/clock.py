"""Virtual time: an event loop whose clock the simulation sets, and the queue of what comes next."""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time stands still until it is told: code that asks the running loop sees ours."""

    def __init__(self) -> None:
        self.virtual_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self.virtual_s


class Agenda:
    """What happens when, in order; equal times in order of their making."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def now(self) -> float:
        return self._loop.virtual_s

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def advance(self) -> bool:
        """Lets the next thing happen; False when nothing is left."""
        if not self._events:
            return False
        when, _, action = heapq.heappop(self._events)
        self._loop.virtual_s = when
        action()
        return True


def run_virtual(make: Callable[[Agenda], Coroutine[Any, Any, T]]) -> T:
    """Runs what `make` returns in a loop of its own, from time 0 on."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(make(Agenda(loop)))
    finally:
        loop.close()
