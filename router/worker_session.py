"""One stream to a worker, from its first frame to its end: slots in flight, load, accounting.

A session belongs to one incarnation. Its counters die with it, so work that ends late can never
be subtracted from the counters of the worker's next life.
"""

import asyncio
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from paceline.core.errors import PacelineError, Unavailable
from paceline.router.hopes import DOUBT_S, Hopes, chance_of_late
from paceline.router.links import NOWHERE, Place, distance_cost, seen_cost
from paceline.router.outliers import Health
from paceline.router.pace import PromptPace
from paceline.router.request import WorkerLife
from paceline.rpc import convert
from paceline.v1 import common_pb2, worker_pb2

OUTBOX_LIMIT = 8192
MAX_LINKS = 1024  # of a worker that are known
STALL_STEPS = 10  # of its longest recent steps without a sign of its step loop: stuck
MIN_STALL_S = 2.0  # but not before, when steps are due; keeps a pause below 3 s
FIRST_STEP_S = 0.5  # assumed of a worker whose pace is unknown; its front vouches for longer ones
SHORTEST_RISE = 1.01  # of the shortest recent step, with each step after it
MIN_QUIET_S = 4.0  # and not before in any other case: its loop answers every beat of its own
BUSY_BACKOFF_S = (0.02, 0.5)  # first and longest pause after Busy


class Listener(Protocol):
    """Told what a worker says about a slot; never blocks, never raises."""

    def on_emission(self, flight: "Flight", emission: common_pb2.Emission) -> None: ...
    def on_reserved(self, flight: "Flight", num_cached_tokens: int) -> None: ...
    def on_busy(self, flight: "Flight") -> None: ...
    def on_moved(self, flight: "Flight") -> None: ...
    def on_ended(self, flight: "Flight") -> None: ...
    def on_error(self, flight: "Flight", error: PacelineError) -> None: ...


class GivenUp(Unavailable):
    """The worker leaves, or has another role: nobody's failure. Another one can go on."""


class Nobody:
    """Listens for slots that were given back. An attempt knows its flights: one that still knew the
    attempt would keep it, and its request, until the collector of cycles comes by."""

    def on_emission(self, flight: "Flight", emission: common_pb2.Emission) -> None: ...
    def on_reserved(self, flight: "Flight", num_cached_tokens: int) -> None: ...
    def on_busy(self, flight: "Flight") -> None: ...
    def on_moved(self, flight: "Flight") -> None: ...
    def on_ended(self, flight: "Flight") -> None: ...
    def on_error(self, flight: "Flight", error: PacelineError) -> None: ...


class Flight:
    """A slot of one attempt on one worker. `pending_tokens`: prompt tokens not yet computed."""

    __slots__ = (
        "began_at",
        "began_step",
        "cancelled",
        "computing",
        "ended",
        "fell",
        "hoped_itl_s",
        "listener",
        "pending_cost",
        "pending_tokens",
        "sent_at",
        "session",
        "slot",
        "used",
    )

    def __init__(
        self,
        session: "WorkerSession",
        slot: int,
        listener: Listener,
        pending_tokens: int,
        pending_cost: float,
    ) -> None:
        self.session = session
        self.slot = slot
        self.listener = listener
        self.pending_tokens = pending_tokens
        self.pending_cost = pending_cost
        self.computing = False  # the worker should be making steps for it
        self.ended = False  # the worker holds nothing of it
        self.fell = False  # the worker was lost while it held something of it
        self.used = False  # the worker has heard of it
        self.cancelled = False  # the worker was told to drop it
        self.hoped_itl_s = 0.0  # from token to token; 0: its request said nothing
        self.began_at = 0.0  # its first tokens came; 0: not yet
        self.began_step = 0  # of the worker, then
        self.sent_at = 0.0  # to a worker with no other prompt; 0: not so

    def hope(self, itl_s: float) -> None:
        session = self.session
        if self.hoped_itl_s:
            session.hopes.remove(self.hoped_itl_s, self._origin)
        session.num_hoping += (itl_s > 0) - (self.hoped_itl_s > 0)
        self.hoped_itl_s = itl_s
        if itl_s:
            session.hopes.add(itl_s, self._origin)

    def begin(self, now: float) -> None:
        """Its first tokens came."""
        itl_s = self.hoped_itl_s
        self.hope(0.0)
        self.began_at, self.began_step = now, self.session.load.step
        self.hope(itl_s)

    @property
    def _origin(self) -> float | None:
        """See Hopes."""
        return self.began_at - self.hoped_itl_s * self.began_step if self.began_at else None

    def send(self, command: worker_pb2.WorkerCommand) -> None:
        if not self.used:
            self.used = True
            self.session.recent_requests += 1
        self.session.send(command)

    @property
    def is_held(self) -> bool:
        """The worker may hold something of it, and was not told to let go."""
        return self.used and not self.ended and not self.cancelled

    def cancel(self) -> None:
        """Tells the worker, once, to drop what it may still hold of the slot."""
        if self.is_held:
            self.cancelled = True
            self.computing = False
            cancel = worker_pb2.CancelSlot(slot=self.slot)
            self.send(worker_pb2.WorkerCommand(cancel=cancel))

    def let_go(self) -> None:
        """Of a prompt: nobody will pull it again."""
        if self.used:
            let_go = worker_pb2.LetGo(slot=self.slot)
            self.send(worker_pb2.WorkerCommand(let_go=let_go))

    def compute(self, command: worker_pb2.WorkerCommand) -> None:
        """Sends what makes the worker compute the prompt."""
        self.computing = True
        session = self.session
        if session.num_waiting_tokens <= self.pending_tokens:
            self.sent_at = asyncio.get_running_loop().time()
        self.send(command)

    def note_pace(self, num_tokens: int, num_cached: int) -> None:
        """The first token of a prompt of `num_tokens` has come."""
        if self.sent_at:
            took_s = asyncio.get_running_loop().time() - self.sent_at
            self.session.pace.note(num_tokens - num_cached, num_cached, took_s)

    def prompt_done(self) -> None:
        if self.pending_tokens:
            self.session.prompt_done(self)


_NOBODY = Nobody()


class WorkerSession:
    def __init__(self, info: worker_pb2.WorkerInfo, now: float) -> None:
        self.info = info
        self.worker_id = info.worker_id
        self.incarnation = info.incarnation
        self.take_role(info)
        self.context_length = info.context_length
        self.most_pages = tuple(info.most_pages) or (0,)
        self.load = worker_pb2.Load(num_free_pages=info.num_pages, num_pages=info.num_pages)
        self.outbox: asyncio.Queue[worker_pb2.WorkerCommand] = asyncio.Queue(OUTBOX_LIMIT)
        self.flights: dict[int, Flight] = {}
        self.pending_tokens = 0
        self.unreported_tokens = 0  # of pending_tokens, sent since the last load came
        self._crossed_tokens = 0  # sent between the two loads before: the last one may not know
        self.num_reported = 0  # sequences that the worker tells of, whosesoever
        self.num_free_pages = self.num_pages = info.num_pages
        self.num_waiting_tokens = 0  # prompt tokens that a new request would wait for
        self.num_running = 0  # sequences there, by what it tells or what this router sent
        self.recent_requests = 0.0
        self.pace = PromptPace()
        self.place: Place = (info.zone, info.node)
        self.links: dict[str, float] = {}  # seconds a token, of its links to sources
        self.token_cost, self.pair_cost = 1.0, 0.0  # by its pace, see fleet.py
        self.cost_s = 0.0  # seconds of a unit; 0: nothing is known
        self.waiting_cost = 0.0  # of num_waiting_tokens
        self._pending_cost = 0.0
        self.hopes = Hopes()
        self.num_hoping = 0  # flights whose requests hope for a time between tokens
        self.num_late = 0
        self.last_frame_at = now
        self.last_step_at = now
        self.last_round_at = now
        self.due_since = now  # steps are, without a break
        self.longest_step_s = FIRST_STEP_S  # of late
        self.shortest_step_s = 0.0  # of late; 0: nothing is known
        self._is_paced = False  # one of its steps was timed
        self.quarantined_until = 0.0  # it got stuck before; a sign of its step loop ends this
        self.health = Health()
        self.lost: str | None = None
        self._slots = itertools.count(1)
        self._busy_until = 0.0
        self._busy_pause = BUSY_BACKOFF_S[0]

    def take_role(self, info: worker_pb2.WorkerInfo) -> None:
        """It has this role from now on. What is in flight goes on as it was planned."""
        self.info = info
        self.is_prefill = info.role == worker_pb2.ROLE_PREFILL  # and nothing else
        self.takes_prompts = info.role in (worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_BOTH)

    @property
    def life(self) -> WorkerLife:
        return self.worker_id, self.incarnation

    @property
    def num_in_flight(self) -> int:
        return len(self.flights)

    def can_take(self, now: float, stale_after_s: float, num_slots: int, num_tokens: int) -> bool:
        """It may get work, has a free slot of `num_slots`, and room for `num_tokens`."""
        return (
            self.lost is None
            and now >= self._busy_until
            and now >= self.quarantined_until
            and self.health.may_take(now, len(self.flights))
            and now - self.last_frame_at <= stale_after_s
            and len(self.flights) < num_slots
            and self.context_length >= num_tokens
            and not self.load.draining
        )

    def is_usable(self, now: float, stale_after_s: float) -> bool:
        """May get new work; it may be busy all the same."""
        fresh = now - self.last_frame_at <= stale_after_s and now >= self.quarantined_until
        is_well = now >= self.health.ejected_until
        return self.lost is None and fresh and is_well and not self.load.draining

    def is_busy(self, now: float) -> bool:
        """It said Busy a moment ago: asking again at once would be a storm."""
        return now < self._busy_until

    def prompt_cost(self, num_new: int, num_cached: int) -> float:
        return num_new * (self.token_cost + self.pair_cost * (num_cached + 0.5 * num_new))

    @contextmanager
    def fly(self, listener: Listener, pending_tokens: int, num_cached: int = 0) -> Iterator[Flight]:
        """A slot, counted from here until the block is left, which ends it at the worker too."""
        cost = self.prompt_cost(pending_tokens, num_cached)
        flight = Flight(self, next(self._slots), listener, pending_tokens, cost)
        self.flights[flight.slot] = flight
        self.pending_tokens += pending_tokens
        self._pending_cost += cost
        self.unreported_tokens += pending_tokens
        self._recount()
        try:
            yield flight
        finally:
            flight.prompt_done()
            flight.hope(0.0)
            del self.flights[flight.slot]
            self._recount()
            flight.cancel()
            flight.listener = _NOBODY

    def pull_costs(
        self, sources: Sequence["WorkerSession"], num_tokens: int, computed: Sequence[float]
    ) -> list[float]:
        """To pull so much from each, while the prompt costs it what it has computed. None: nothing
        is known."""
        if not self.links and self.place == NOWHERE:
            return []
        costs, seconds = [], self.links.get
        for source, while_pulled in zip(sources, computed, strict=True):
            unit_s, pull_s = source.cost_s, num_tokens * seconds(source.worker_id, 0.0)
            costs.append(seen_cost(pull_s / unit_s, while_pulled) if unit_s else 0.0)
        if self.place != NOWHERE:
            distances = (distance_cost(self.place, source.place) for source in sources)
            costs = [c + num_tokens * far for c, far in zip(costs, distances, strict=True)]
        return costs

    def prompt_done(self, flight: Flight) -> None:
        """Nothing of its prompt is to be computed any more."""
        self.pending_tokens -= flight.pending_tokens
        self._pending_cost -= flight.pending_cost
        flight.pending_tokens, flight.pending_cost = 0, 0.0
        if not self.pending_tokens:
            self._pending_cost = 0.0  # what was rounded is gone
        self._recount()

    def misses(
        self, num_new: int, num_cached: int, now: float, due: float, doubt_s: float = DOUBT_S
    ) -> float:
        """Hopes that would be missed because of such a prompt here: streams', and its own for a
        first token until `due`, give or take `doubt_s`."""
        prompt_s = self.cost_s * self.prompt_cost(num_new, num_cached)
        ahead_s = self.cost_s * self.waiting_cost
        late = chance_of_late(due - now - ahead_s - prompt_s, doubt_s)
        if not self.num_hoping:
            return late
        step, longest, shortest = self.load.step, self.longest_step_s, self.shortest_step_s
        return late + self.hopes.misses(step, now, longest, ahead_s, prompt_s, shortest)

    def send(self, command: worker_pb2.WorkerCommand) -> None:
        if self.lost is None:
            try:
                self.outbox.put_nowait(command)
            except asyncio.QueueFull:
                self.lose("outbox")

    def handle(self, frame: worker_pb2.WorkerFrame, now: float) -> None:
        """Passes a frame's news on, in the order in which the worker means them."""
        self.last_frame_at = now
        if frame.HasField("load"):
            self._take_load(frame.load, now)
        if frame.links:
            links = itertools.islice(frame.links, MAX_LINKS)
            self.links = {
                link.source: 1e-6 * link.token_us for link in links if 0 < link.token_us < math.inf
            }
        flights = self.flights
        for emission in frame.emissions:
            flight = flights.get(emission.slot)
            if flight is None:
                self.num_late += 1
            else:
                if not flight.began_at and emission.token_ids:
                    flight.begin(now)
                flight.listener.on_emission(flight, emission)
        if frame.reserved or frame.busy or frame.errors or frame.ended_slots:
            self._handle_control(frame, now)

    def lose(self, reason: str) -> None:
        """The stream is gone: tells every slot on it, once."""
        if self.lost is not None:
            return
        self.lost = reason
        for flight in list(self.flights.values()):
            flight.fell = flight.is_held and not self.load.draining
            flight.ended = True
            flight.listener.on_error(flight, Unavailable("a worker was lost"))

    def check_progress(self, now: float, stall_after_s: float) -> bool:
        """False when it holds work of ours and its step loop gave no sign for too long.

        How long that is follows from its own pace, up to `stall_after_s`.
        """
        if not self._is_computing():
            self.due_since = now
        pace_s = STALL_STEPS * self.longest_step_s
        overdue_s = now - max(self.last_round_at, self.due_since)
        if overdue_s > min(stall_after_s, max(MIN_STALL_S, pace_s)):
            return False
        is_quiet = now - self.last_round_at > min(stall_after_s, max(MIN_QUIET_S, pace_s))
        return not (is_quiet and any(flight.is_held for flight in self.flights.values()))

    def _take_load(self, load: worker_pb2.Load, now: float) -> None:
        if load.step != self.load.step:
            if self._is_computing():
                taken_s = now - max(self.last_step_at, self.due_since)
                self._note_step(taken_s / max(1, load.step - self.load.step))
            self.last_step_at = now
        if load.rounds != self.load.rounds:
            self.last_round_at = now
            self.quarantined_until = 0.0
        self.load = load
        self.pace.tell(1e-6 * load.prompt_token_us)
        self.num_reported = load.num_running + load.num_waiting
        self.num_free_pages, self.num_pages = load.num_free_pages, load.num_pages
        self._crossed_tokens, self.unreported_tokens = self.unreported_tokens, 0
        self._recount()

    def _recount(self) -> None:
        """What planners read, kept ready: they read it of all workers. Of what was sent just before
        the last load came, it may not tell."""
        pending = self.pending_tokens
        crossed, unreported = min(self._crossed_tokens, pending), self.unreported_tokens
        told = max(self.load.num_waiting_tokens, crossed)
        self.num_waiting_tokens = told + min(unreported, pending)
        per_token = self._pending_cost / pending if pending else self.token_cost
        self.waiting_cost = per_token * self.num_waiting_tokens
        self.num_running = max(self.num_reported, len(self.flights))

    def _is_computing(self) -> bool:
        """Steps are due. They may not be while all that is there waits, for pages of others."""
        if self.load.num_waiting and not self.load.num_running:
            return False
        return any(flight.computing for flight in self.flights.values())

    def _note_step(self, duration_s: float) -> None:
        """Of one step, on average: those without news for us are reported by beats only."""
        faded = 0.95 * self.longest_step_s if self._is_paced else 0.0
        self.longest_step_s = max(duration_s, faded)
        risen = SHORTEST_RISE * self.shortest_step_s if self._is_paced else math.inf
        self.shortest_step_s = min(duration_s, risen)
        self._is_paced = True

    def _handle_control(self, frame: worker_pb2.WorkerFrame, now: float) -> None:
        for reserved in frame.reserved:
            self._busy_pause = BUSY_BACKOFF_S[0]
            if flight := self.flights.get(reserved.slot):
                flight.listener.on_reserved(flight, reserved.num_cached_tokens)
        for busy in frame.busy:
            self.note_busy(now)
            if flight := self.flights.get(busy.slot):
                flight.ended = True
                flight.listener.on_busy(flight)
        for failed in frame.errors:
            if flight := self.flights.get(failed.slot):
                error = convert.error_from_proto(failed.error)
                flight.listener.on_error(
                    flight, GivenUp(error.message) if failed.elsewhere else error
                )
        for slot in frame.ended_slots:
            if flight := self.flights.get(slot):
                flight.ended = True
                flight.listener.on_ended(flight)

    def note_busy(self, now: float) -> None:
        self._busy_until = now + self._busy_pause
        self._busy_pause = min(2 * self._busy_pause, BUSY_BACKOFF_S[1])
