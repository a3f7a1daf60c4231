"""One attempt at (part of) a request: slots on one worker or two, and what comes back from them.

Emissions arrive by callback, without a task in between. Only what continues the token log counts:
older positions were sent before and are dropped, a gap is a failure. One exception: when prefill
and decode run apart, decode may be heard before the first token, which travels from prefill.
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from paceline.core import tracing
from paceline.core.errors import EngineFailure, ErrorCode, KvUnavailable, PacelineError, Unavailable
from paceline.core.tracing import NO_SPAN, Attributes, Tracing
from paceline.router.planner import Plan, Split
from paceline.router.prefix_hints import Hints
from paceline.router.request import CANCELLED, Request, TokenLog, WorkerLife
from paceline.router.worker_session import Flight, WorkerSession
from paceline.v1 import common_pb2, worker_pb2

PROOF_TOKENS = 8  # that it got on by: what its request had brought before kills nobody
MAX_HELD = 256  # emissions of decode that wait for the first token from prefill


class Busy(Exception):
    """The decode worker has no room now; nothing was computed."""


class Moved(Busy):
    """Another worker may begin with it sooner."""


class Attempt:
    """Made when a plan is found: from then on its slots count as in flight, until `close`."""

    def __init__(
        self,
        request: Request,
        choices: tuple[int, ...],
        plan: Plan,
        sessions: dict[str, WorkerSession],
        hints: Hints = (),
    ) -> None:
        self.request = request
        self.hints = hints  # for the worker that computes the prompt
        self.choices = choices
        self.plan = plan
        self.number = request.next_attempt
        request.next_attempt += 1
        loop = asyncio.get_running_loop()
        self.reserved: asyncio.Future[int] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.num_cached_tokens: int | None = None  # as the worker reports
        self.opened_at = loop.time()
        self.reserved_s: float | None = None  # that decode took to reserve
        self.prompt_s: float | None = None  # until the first token of the prompt
        self.on_first_tokens: Callable[[], None] = _nothing
        self.on_proof: Callable[[], None] = _nothing  # it gets on: nobody dies of it
        self.failed_at: Flight | None = None
        self._remaining = set(choices)
        self._start = len(request.logs[choices[0]].tokens)
        self._held: list[common_pb2.Emission] = []
        self._decode_heard = False
        self._is_told = False  # to the gateway, where it runs
        self.is_proven = False  # it has got on
        self._span = NO_SPAN
        self._error = ""  # code of its failure
        self._stack = ExitStack()
        self._open(plan, sessions)

    def _open(self, plan: Plan, sessions: dict[str, WorkerSession]) -> None:
        chosen = plan.prefill if isinstance(plan, Split) else plan.worker
        num_tokens = self.request.num_prompt_tokens + self._start
        uncached = max(1, num_tokens - chosen.num_cached_tokens)
        fly = self._stack.enter_context
        session = sessions[chosen.worker_id]
        self.compute = fly(session.fly(self, uncached, num_tokens - uncached))  # of the prompt
        self.decode: Flight | None = None
        if isinstance(plan, Split):
            self.decode = fly(sessions[plan.decode.worker_id].fly(self, 0))
        (self.decode or self.compute).hope(self.request.targets.itl_ms / 1000)

    @property
    def sessions(self) -> list[WorkerSession]:
        return [flight.session for flight in self.flights]

    @property
    def worker_is_lost(self) -> bool:
        return self.failed_at is not None and self.failed_at.session.lost is not None

    def guilty(self, failure: PacelineError) -> list[WorkerSession]:
        """Whose fault it may be. That KV did not come may be its source's, or its reader's."""
        if self.failed_at is None or failure.code == ErrorCode.KV_UNAVAILABLE:
            return self.sessions
        return [self.failed_at.session]

    @property
    def lost(self) -> WorkerLife | None:
        """The worker that was lost while this ran there."""
        flight = self.failed_at
        return flight.session.life if flight is not None and flight.fell else None

    def begin_span(self, spans: Tracing) -> None:
        attributes: Attributes = {
            tracing.ATTEMPT_NUMBER: self.number,
            tracing.PREFILL_WORKER: self.compute.session.worker_id,
            tracing.DECODE_WORKER: self._decode_worker,
        }
        self._span = spans.start(tracing.ATTEMPT, self.request.span.traceparent, attributes)

    @property
    def traceparent(self) -> str:
        """For the workers."""
        return self._span.traceparent

    @property
    def flights(self) -> list[Flight]:
        return [self.compute] if self.decode is None else [self.compute, self.decode]

    def _elapsed_s(self) -> float:
        return asyncio.get_running_loop().time() - self.opened_at

    @property
    def cost(self) -> float | None:
        """Of the worker that computes the prompt, as it was planned, up to the first token."""
        if not self.plan.considered:
            return None
        cost = self.plan.considered[0][1]  # who was taken comes first
        return cost.total - cost.misses - cost.pull

    @property
    def num_predicted_tokens(self) -> int:
        plan = self.plan
        return (plan.prefill if isinstance(plan, Split) else plan.worker).num_cached_tokens

    @property
    def first_tokens_in(self) -> bool:
        return all(len(self._log(i).tokens) > self._start for i in self._remaining)

    @property
    def decode_heard(self) -> bool:
        return self._decode_heard

    def close(self) -> None:
        """Ends its slots at every worker that may still hold something of them."""
        for future in (self.reserved, self.done):
            future.cancel()
        if self.decode is not None and self.decode.session.lost and self.compute.is_held:
            self._revoke()
        self._stack.close()
        if self.decode is not None:
            self.compute.let_go()
        self._span.end(error=self._error)

    def cancel(self, choices: set[int]) -> None:
        """The client wants these no more."""
        if not choices & self._remaining:
            return
        for flight in self.flights:
            if flight.is_held:
                cancel = worker_pb2.CancelSlot(slot=flight.slot, choices=sorted(choices))
                flight.send(worker_pb2.WorkerCommand(cancel=cancel))
        for choice in choices & self._remaining:
            self._finish(choice)

    def fail(self, error: Exception, flight: Flight | None = None) -> None:
        """`flight`: whose fault it is, if it is known."""
        if not self.done.done():
            self.failed_at = flight
            self._error = error.code.value if isinstance(error, PacelineError) else "busy"
        for future in (self.reserved, self.done):
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: nobody may be waiting for this one

    # --- what the workers say (Listener) ------------------------------------------------------

    def on_emission(self, flight: Flight, emission: common_pb2.Emission) -> None:
        if emission.HasField("prompt_logprobs"):
            if flight is self.compute:
                self.request.pass_on(emission)
            return
        if flight is self.compute:
            flight.prompt_done()
            if self.num_cached_tokens is None:
                self.num_cached_tokens = emission.num_cached_tokens
                self.prompt_s = self._elapsed_s()
                if not self.reserved.done():  # whole: nobody was asked for a reservation
                    self.reserved.set_result(emission.num_cached_tokens)
                num_tokens = self.request.num_prompt_tokens + self._start
                flight.note_pace(num_tokens, emission.num_cached_tokens)
            self._take(flight, emission)
            if self._held:
                self._release_held()
            if self.decode is not None and self.first_tokens_in:
                flight.computing = False
                self.on_first_tokens()
                self._let_go()
            return
        flight.computing = True
        if not self._decode_heard:
            self._decode_heard = True
            self._let_go()
        if emission.choice not in self._remaining:
            return
        if emission.position > len(self._log(emission.choice).tokens):
            self._hold(emission)
        else:
            self._take(flight, emission)

    def on_reserved(self, flight: Flight, num_cached_tokens: int) -> None:
        if flight is self.decode and not self.reserved.done():
            self.reserved_s = self._elapsed_s()
            self.reserved.set_result(num_cached_tokens)

    def on_busy(self, flight: Flight) -> None:
        self.fail(Busy())

    def on_moved(self, flight: Flight) -> None:
        self.fail(Moved())

    def on_ended(self, flight: Flight) -> None:
        """Prefill ends its slot once its KV was taken; any other end is too early here."""
        flight.computing = False
        if flight is self.compute and self.decode is not None and self.first_tokens_in:
            return
        if flight is self.decode and self._held:
            return  # all is said, but for the first token
        if self._remaining:
            self.fail(EngineFailure("a worker ended the request early"), flight)

    def on_error(self, flight: Flight, error: PacelineError) -> None:
        """Prefill is not needed any more once decode goes on by itself."""
        goes_on = self.decode is not None and self._decode_heard and self.first_tokens_in
        if flight is self.compute and goes_on:
            return
        self.fail(error, flight)

    def _let_go(self) -> None:
        """Decode goes on by itself: prefill must not hold the KV until somebody else says so."""
        if self.decode is not None and self._decode_heard and self.first_tokens_in:
            self.compute.cancel()

    def _revoke(self) -> None:
        """The reader is dead: its leases at the source would last until it is found silent."""
        revoke = worker_pb2.Revoke(request_id=self.request.request_id, attempt=self.number)
        self.compute.send(worker_pb2.WorkerCommand(revoke=revoke))

    # --- the token log ------------------------------------------------------------------------

    def _log(self, choice: int) -> TokenLog:
        return self.request.logs[choice]

    def _take(self, flight: Flight, emission: common_pb2.Emission) -> None:
        if emission.choice not in self._remaining:
            return
        log = self._log(emission.choice)
        num_old = len(log.tokens) - emission.position
        if num_old < 0:
            self.fail(EngineFailure("a worker skipped output tokens"), flight)
            return
        if num_old > 0:
            _drop_old(emission, num_old)
        if emission.finish == CANCELLED:
            self.fail(Unavailable("a worker gave the request up"), flight)
        elif emission.token_ids or emission.finish:
            if not self._is_told:
                self._tell_placement(emission)
            self.request.append(log, emission)
            if not self.is_proven and len(log.tokens) > self._start + PROOF_TOKENS:
                self.is_proven = True
                self.on_proof()
            if emission.finish:
                self._finish(emission.choice)

    def _tell_placement(self, emission: common_pb2.Emission) -> None:
        self._is_told = True
        emission.placement.attempt = self.number
        emission.placement.prefill_worker = self.compute.session.worker_id
        emission.placement.decode_worker = self._decode_worker

    @property
    def _decode_worker(self) -> str:
        """Empty: one token is all."""
        chosen = self.plan.decode if isinstance(self.plan, Split) else self.plan.worker
        return "" if chosen.is_prefill else chosen.worker_id

    def _hold(self, emission: common_pb2.Emission) -> None:
        if len(self._held) >= MAX_HELD:
            self.fail(KvUnavailable("the first token did not arrive"))
        else:
            self._held.append(emission)

    def _release_held(self) -> None:
        assert self.decode is not None
        held, self._held = self._held, []
        for emission in held:
            if emission.position > len(self._log(emission.choice).tokens):
                self._held.append(emission)
            else:
                self._take(self.decode, emission)
        if self.decode.ended and not self._held:
            self.on_ended(self.decode)

    def _finish(self, choice: int) -> None:
        self.request.logs[choice].finished = True
        self._remaining.discard(choice)
        if not self._remaining and not self.done.done():
            self.done.set_result(None)


def _drop_old(emission: common_pb2.Emission, num_old: int) -> None:
    """Leaves what lies beyond the log: a worker may repeat what an earlier attempt sent."""
    emission.position += min(num_old, len(emission.token_ids))
    del emission.token_ids[:num_old]
    del emission.logprobs[:num_old]


def _nothing() -> None:
    return None
