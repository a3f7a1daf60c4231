"""Who of those that wait for workers of one kind is next.

Strict between priorities, the smaller first. Within one, tenants share by weight what is placed, in
tokens: next is who had least, then whose next one came first; to have been away earns nothing.
Within a tenant the one that is due first, then the one that came first.

Who comes back, because its worker was busy or failed, has had its turn and goes before the others
of its priority. All wait behind one for whom there is no room, so small requests never overtake a
large one for ever.
"""

import enum
import heapq
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

BASE_TOKENS = 256  # that a request counts beside its prompt: the output that decode reserves


@dataclass(frozen=True, slots=True)
class Turn:
    """What a place follows from. It stays the same for the later waits of a request."""

    priority: int
    tenant: str
    weight: float  # of the tenant
    due: float  # when its first token is wanted, by the event loop's clock
    arrival: int
    num_tokens: int  # of the prompt

    @property
    def order(self) -> tuple[float, int]:
        """Within a tenant."""
        return self.due, self.arrival

    @property
    def cost(self) -> float:
        return (self.num_tokens + BASE_TOKENS) / self.weight


class Answer(enum.Enum):
    """What became of one whose turn it was."""

    PLACED = enum.auto()
    GONE = enum.auto()  # refused, or not waiting any more
    NO_ROOM = enum.auto()


class Waiting(Protocol):
    @property
    def turn(self) -> Turn: ...


W = TypeVar("W", bound=Waiting)
Ask = Callable[[W], Answer]


@dataclass(slots=True)
class _Tenant(Generic[W]):
    had: float = 0.0  # tokens over weight; less than the clock counts as much as it
    waiting: list[tuple[tuple[float, int], int, W]] = field(default_factory=list)  # a heap


class _Class(Generic[W]):
    """Those of one priority."""

    def __init__(self) -> None:
        self._first: list[W] = []  # who come back, by order
        self._tenants: dict[str, _Tenant[W]] = {}
        self._clock = 0.0  # what the last one that was placed had had
        self._pushes = 0

    @property
    def is_empty(self) -> bool:
        return not self._first and not any(t.waiting for t in self._tenants.values())

    def push(self, waiter: W, *, comes_back: bool) -> None:
        if comes_back:
            insort(self._first, waiter, key=_order)
            return
        turn = waiter.turn
        tenant = self._tenants.setdefault(turn.tenant, _Tenant())
        self._pushes += 1
        heapq.heappush(tenant.waiting, (turn.order, self._pushes, waiter))

    def remove(self, waiter: W) -> None:
        if waiter in self._first:
            self._first.remove(waiter)
        elif tenant := self._tenants.get(waiter.turn.tenant):
            tenant.waiting = [entry for entry in tenant.waiting if entry[2] is not waiter]
            heapq.heapify(tenant.waiting)

    def serve(self, ask: Ask[W]) -> bool:
        """False: there is no room for the one whose turn it is."""
        while self._first:
            if ask(self._first[0]) is Answer.NO_ROOM:
                return False
            self._first.pop(0)
        while (tenant := self._next()) is not None:
            waiter = tenant.waiting[0][2]
            answer = ask(waiter)
            if answer is Answer.NO_ROOM:
                return False
            heapq.heappop(tenant.waiting)
            if answer is Answer.PLACED:
                self._charge(tenant, waiter.turn.cost)
        return True

    def _next(self) -> _Tenant[W] | None:
        waiting = (tenant for tenant in self._tenants.values() if tenant.waiting)
        return min(waiting, key=lambda t: (max(t.had, self._clock), t.waiting[0][1]), default=None)

    def _charge(self, tenant: _Tenant[W], cost: float) -> None:
        self._clock = max(tenant.had, self._clock)
        tenant.had = self._clock + cost
        behind = [n for n, t in self._tenants.items() if not t.waiting and t.had <= self._clock]
        for name in behind:
            del self._tenants[name]


class Lineup(Generic[W]):
    """Of one kind of workers."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class[W]] = {}

    def __bool__(self) -> bool:
        return bool(self._classes)

    def push(self, waiter: W, *, comes_back: bool = False) -> None:
        """`comes_back`: it had its turn before."""
        line = self._classes.setdefault(waiter.turn.priority, _Class())
        line.push(waiter, comes_back=comes_back)

    def remove(self, waiter: W) -> None:
        priority = waiter.turn.priority
        if line := self._classes.get(priority):
            line.remove(waiter)
            if line.is_empty:
                del self._classes[priority]

    def serve(self, ask: Ask[W]) -> None:
        """Asks one after the other what becomes of it, until there is no room for one."""
        for priority in sorted(self._classes):
            line = self._classes[priority]
            has_room = line.serve(ask)
            if line.is_empty:
                del self._classes[priority]
            if not has_room:
                return


def _order(waiter: Waiting) -> tuple[float, int]:
    return waiter.turn.order
