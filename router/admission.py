"""The router's queue: bounded, and served by lineup.py, one line-up a group.

A group has the same model and the same kind of worker; groups do not wait for each other.

A full queue refuses at once, but it is no single tenant's: who holds less of it takes the place of
the newest request of another tenant that holds more, which is refused in turn. So does a request of
a higher priority.
"""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from paceline.core.errors import Overloaded, PacelineError
from paceline.router.lineup import Answer, Lineup, Turn

RETRY_AFTER_S = (1.0, 60.0)  # least and most that a refused caller is told to wait
_SMOOTHING = 0.1


class Placement(Protocol):
    def close(self) -> None:
        """Gives back what the placement holds."""


P = TypeVar("P", bound=Placement)
Place = Callable[[], P | None]


class _Waiter(Generic[P]):
    __slots__ = ("comes_back", "future", "group", "place", "turn")

    def __init__(self, group: Hashable, turn: Turn, place: Place[P], *, comes_back: bool) -> None:
        self.group = group
        self.turn = turn
        self.place = place
        self.comes_back = comes_back
        self.future: asyncio.Future[P] = asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class _Share(Generic[P]):
    """What a tenant has waiting in one priority."""

    cost: float = 0.0
    waiters: dict[_Waiter[P], None] = field(default_factory=dict)  # newest last


class AdmissionQueue(Generic[P]):
    """Bounded in requests and in the prompt tokens that they hold in memory."""

    def __init__(self, limit: int, token_limit: int) -> None:
        self.limit = limit
        self.token_limit = token_limit
        self._groups: dict[Hashable, Lineup[_Waiter[P]]] = {}
        self._shares: dict[tuple[int, str], _Share[P]] = {}  # by priority and tenant
        self.num_asking = 0  # that ask a worker again which said Busy: they wait as well
        self._num_waiting = 0
        self._num_by_group: Counter[Hashable] = Counter()
        self._num_tokens = 0
        self._arrivals = itertools.count()
        self._placed_at: float | None = None
        self._interval_s = 0.05  # between placements, smoothed

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_tokens(self) -> int:
        """Of the prompts that wait."""
        return self._num_tokens

    @property
    def num_by_group(self) -> Mapping[Hashable, int]:
        """How many wait; those groups alone of which one does."""
        return self._num_by_group

    def next_arrival(self) -> int:
        return next(self._arrivals)

    def make_room(self, turn: Turn) -> None:
        """For a request that will wait. Raises Overloaded when the queue is full. An empty queue
        takes a prompt of any length."""
        given_up = []
        num, tokens = self._num_waiting + self.num_asking, self._num_tokens
        victims = self._victims(turn)
        while num and (num >= self.limit or tokens + turn.num_tokens > self.token_limit):
            victim = next(victims, None)
            if victim is None:
                raise self._overloaded()
            given_up.append(victim)
            num, tokens = num - 1, tokens - victim.turn.num_tokens
        for victim in given_up:
            if not victim.future.done():  # else it is leaving
                victim.future.set_exception(self._overloaded())
            self._forget(victim)

    def retry_after_s(self) -> float:
        """When a place may be free: the queue's length at the present pace."""
        wait = math.ceil(self._num_waiting * self._interval_s)
        return float(min(max(wait, RETRY_AFTER_S[0]), RETRY_AFTER_S[1]))

    async def wait(
        self, group: Hashable, turn: Turn, place: Place[P], *, comes_back: bool = False
    ) -> P:
        """What `place` returns once it is this request's turn and there is room.

        `place` returns None while there is none, and raises PacelineError to end the wait. The
        caller owns the result; one that arrives together with a cancellation is closed here.
        `comes_back`: the request had its turn before.
        """
        waiter = _Waiter(group, turn, place, comes_back=comes_back)
        self._groups.setdefault(group, Lineup()).push(waiter, comes_back=comes_back)
        share = self._shares.setdefault((turn.priority, turn.tenant), _Share())
        share.cost += turn.cost
        share.waiters[waiter] = None
        self._num_waiting += 1
        self._num_by_group[waiter.group] += 1
        self._num_tokens += turn.num_tokens
        self._serve(group)
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def wake(self) -> None:
        """Something changed: places all that can be placed now."""
        for group in list(self._groups):
            self._serve(group)

    def _serve(self, group: Hashable) -> None:
        if lineup := self._groups.get(group):
            lineup.serve(self._ask)
            if not lineup:
                self._groups.pop(group, None)

    def _ask(self, waiter: _Waiter[P]) -> Answer:
        answer = Answer.GONE if waiter.future.done() else self._settle(waiter)
        if answer is not Answer.NO_ROOM:
            self._uncount(waiter)
        return answer

    def _settle(self, waiter: _Waiter[P]) -> Answer:
        try:
            placement = waiter.place()
        except PacelineError as error:
            waiter.future.set_exception(error)
            return Answer.GONE
        if placement is None:
            return Answer.NO_ROOM
        waiter.future.set_result(placement)
        self._note_pace()
        return Answer.PLACED

    def _leave(self, waiter: _Waiter[P]) -> None:
        """Its task was cancelled: while it waited, or just after it was placed."""
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().close()
        self._forget(waiter)
        self._serve(waiter.group)  # it may have been the one that all waited for

    def _forget(self, waiter: _Waiter[P]) -> None:
        if lineup := self._groups.get(waiter.group):
            lineup.remove(waiter)
        self._uncount(waiter)

    def _uncount(self, waiter: _Waiter[P]) -> None:
        """Once: nothing more if it waits no longer."""
        key = waiter.turn.priority, waiter.turn.tenant
        share = self._shares.get(key)
        if share is None or waiter not in share.waiters:
            return
        del share.waiters[waiter]
        share.cost -= waiter.turn.cost
        if not share.waiters:
            del self._shares[key]
        self._num_waiting -= 1
        self._num_by_group[waiter.group] -= 1
        if not self._num_by_group[waiter.group]:
            del self._num_by_group[waiter.group]
        self._num_tokens -= waiter.turn.num_tokens

    def _victims(self, turn: Turn) -> Iterator[_Waiter[P]]:
        """Whose place a request may take, in this order: those of lower priorities, and of its own
        the newest of whoever has no less than its tenant even then. Nobody's who has had a turn:
        its client may have tokens."""
        costs = {key: share.cost for key, share in self._shares.items()}
        newest = {
            key: (waiter for waiter in reversed(share.waiters) if not waiter.comes_back)
            for key, share in self._shares.items()
        }
        own = costs.get((turn.priority, turn.tenant), 0.0) + turn.cost
        while costs:
            key = max(costs, key=lambda key: (key[0], costs[key]))
            priority, tenant = key
            is_lower = priority > turn.priority
            victim = next(newest[key], None)
            if victim is None:
                del costs[key]
                continue
            costs[key] -= victim.turn.cost
            is_fair = priority == turn.priority and tenant != turn.tenant and costs[key] >= own
            if not is_lower and not is_fair:
                return
            yield victim

    def _overloaded(self) -> Overloaded:
        waiting = f"{self._num_waiting} requests with {self._num_tokens} tokens are waiting"
        return Overloaded(f"the queue is full: {waiting}", retry_after_s=self.retry_after_s())

    def _note_pace(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._placed_at is not None:
            interval = min(now - self._placed_at, 10.0)
            self._interval_s += _SMOOTHING * (interval - self._interval_s)
        self._placed_at = now
