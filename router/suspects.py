"""Which requests ran on workers that died, and which of them is the cause.

A death speaks against all requests that the worker held: one of them may have killed it, or none.
Who gets on elsewhere – some tokens more, or its end – is innocent of all deaths before. Who does
not, and is there when a second worker dies, is the cause, unless another request shared both
deaths, or as many workers died meanwhile without need of it: then each such request is tried by
itself, so that the next death tells; that all others get on tells nothing, since nobody may have
been the cause. The cause is refused, and so is what equals it (same tenant and prompt) for a
while: a client that sends it again shall not cost two workers more. Equal requests, and choices
that run apart, may be on several workers at once: when these die together, that is one death.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from operator import itemgetter

from paceline.core.errors import RequestQuarantined
from paceline.router.quarantine import Quarantine, fingerprint
from paceline.router.request import Request, WorkerLife

NUM_KILLED = 2  # workers, until a request is taken for the cause
VERDICT_S = 3.0  # in which a worker that was lost is back, or known to be dead
SETTLE_S = 1.0  # in which all requests of a worker have told of its death, and a rack has died
LOOK_S = 0.05
TRIAL_WAIT_S = 30.0  # for the trials of others
REMEMBERED_S = 600.0
ALIBI_S = 5.0  # before its first death: whatever kills many workers may begin with others
MAX_REMEMBERED = 4096  # requests that were on workers that died

Fate = Callable[[WorkerLife], bool | None]
Run = tuple[float, float]  # its begin and end, by the loop's clock


class Trial:
    """While it lasts, no other suspect is tried."""

    def __init__(self, lock: asyncio.Lock | None = None) -> None:
        self._lock = lock

    def end(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


class Suspects:
    """Of one router; gateways carry what it knows of a request to the next one. `fate`: whether a
    worker's life has ended; None: nobody knows yet."""

    def __init__(self, fate: Fate, on_caught: Callable[[], object]) -> None:
        self._fate = fate
        self._on_caught = on_caught
        self.quarantine = Quarantine()
        self._deaths: OrderedDict[bytes, dict[WorkerLife, Run]] = OrderedDict()
        self._lost: OrderedDict[WorkerLife, float] = OrderedDict()  # whatever ran there
        # Of whom it was not clear: that others are acquitted meanwhile makes it no clearer.
        self._unclear: OrderedDict[bytes, frozenset[WorkerLife]] = OrderedDict()
        self._trial = asyncio.Lock()

    def note(
        self, request: Request, lives: Iterable[WorkerLife], since: float | None = None
    ) -> None:
        """It was running there, `since` then, when they were lost; not known: one after another."""
        now = _now()
        deaths = self._deaths.setdefault(fingerprint(request), {})
        for life in lives:
            began, _ = deaths.get(life, (0.0, 0.0))
            deaths[life] = max(began, now if since is None else since), now
            self.note_lost(life)
        self._deaths.move_to_end(fingerprint(request))
        self._forget_old(now)
        while len(self._deaths) > MAX_REMEMBERED:
            self._deaths.popitem(last=False)

    def note_lost(self, life: WorkerLife) -> None:
        """A worker, whatever ran there."""
        self._lost.setdefault(life, _now())
        while len(self._lost) > MAX_REMEMBERED:
            self._lost.popitem(last=False)

    def acquit(self, request: Request) -> None:
        """It got on."""
        if self._deaths:
            self._deaths.pop(fingerprint(request), None)
            self._unclear.pop(fingerprint(request), None)

    async def judge(self, request: Request) -> None:
        """Raises RequestQuarantined if workers died of it; waits until that can be known."""
        self.quarantine.check(request)
        if not self._deaths or self._num_in_turn(request, self._open(request)) < NUM_KILLED:
            return
        await asyncio.sleep(SETTLE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(VERDICT_S):
                await self._until_known(request)
        self._decide(request)

    async def trial(self, request: Request) -> Trial:
        """Before it is placed: returns when it may be. Raises RequestQuarantined."""
        await self.judge(request)
        if self._num_in_turn(request, self._killed(request)) < NUM_KILLED:
            return Trial()
        try:
            async with asyncio.timeout(TRIAL_WAIT_S):
                await self._trial.acquire()
        except TimeoutError:
            return Trial()
        trial = Trial(self._trial)
        try:
            self._decide(request)  # another one may have been found guilty of the same deaths
        except RequestQuarantined:
            trial.end()
            raise
        if self._num_in_turn(request, self._killed(request)) < NUM_KILLED:
            trial.end()
        return trial

    def _forget_old(self, now: float) -> None:
        """Of requests that were cancelled before they got on: who noted last stands last."""
        after = now - REMEMBERED_S
        while self._deaths:
            oldest = next(iter(self._deaths.values()))
            if any(died >= after for _, died in oldest.values()):
                return
            self._deaths.popitem(last=False)

    async def _until_known(self, request: Request) -> None:
        while any(self._fate(life) is None for life in self._open(request)):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)  # dials tell

    def _open(self, request: Request) -> set[WorkerLife]:
        """Deaths that speak against it. Those of workers that came back as they were do not."""
        deaths = self._deaths.get(fingerprint(request), {}) if self._deaths else {}
        after = _now() - REMEMBERED_S
        for life, (_, died) in list(deaths.items()):
            if died < after or self._fate(life) is False:
                del deaths[life]
        return set(deaths)

    def _killed(self, request: Request) -> frozenset[WorkerLife]:
        return frozenset(life for life in self._open(request) if self._fate(life))

    def _decide(self, request: Request) -> None:
        killed = self._killed(request)
        num_killed = self._num_in_turn(request, killed)
        if num_killed >= NUM_KILLED:
            name = fingerprint(request)
            is_alone = num_killed > self._num_died(request, killed) - num_killed
            if is_alone and not self._shared(request, killed) and killed != self._unclear.get(name):
                self._catch(request, killed)
            else:
                self._unclear[name] = killed
                while len(self._unclear) > MAX_REMEMBERED:
                    self._unclear.popitem(last=False)
        self.quarantine.check(request)

    def _num_in_turn(self, request: Request, lives: Iterable[WorkerLife]) -> int:
        """Deaths of which each followed the one before, as where one request tries again."""
        runs = [self._deaths[fingerprint(request)][life] for life in lives]
        count, ended = 0, float("-inf")
        for began, died in sorted(runs, key=itemgetter(1)):
            if began >= ended:
                count, ended = count + 1, died
        return count

    def _num_died(self, request: Request, killed: frozenset[WorkerLife]) -> int:
        """Workers, meanwhile, with it or without it; of some it may not be known yet."""
        since = min(self._deaths[fingerprint(request)][life][1] for life in killed) - ALIBI_S
        meanwhile = {life for life, at in self._lost.items() if at >= since} | killed
        return sum(self._fate(life) is not False for life in meanwhile)

    def _shared(self, request: Request, killed: frozenset[WorkerLife]) -> bool:
        """Another request was there each time."""
        own = fingerprint(request)
        return any(killed <= lives.keys() for name, lives in self._deaths.items() if name != own)

    def _catch(self, request: Request, killed: frozenset[WorkerLife]) -> None:
        """Of these deaths nobody else is suspected any more."""
        self.quarantine.catch(request, killed, REMEMBERED_S)
        del self._deaths[fingerprint(request)]
        for life in killed:
            self._lost.pop(life, None)
            for deaths in self._deaths.values():
                deaths.pop(life, None)
        self._on_caught()


def _now() -> float:
    return asyncio.get_running_loop().time()
