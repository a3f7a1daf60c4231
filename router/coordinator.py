"""Drives each request to its one end: place → reserve → prefill and adopt → emissions → end.

Any retryable failure costs an attempt: the survivors' slots are cancelled and the next attempt is
forced through prompt and token log. Once tokens of several choices were sent, each choice goes on
by itself.
"""

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import cast

import structlog

from paceline.core import tracing
from paceline.core.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    PacelineError,
)
from paceline.core.keys import tenant_digest
from paceline.core.tracing import Tracing
from paceline.router.admission import AdmissionQueue
from paceline.router.attempt import Attempt, Busy
from paceline.router.config import RouterConfig
from paceline.router.decision_log import DecisionLog
from paceline.router.dispatch import Dispatcher
from paceline.router.fleet import Fleet
from paceline.router.measures import Measures
from paceline.router.metrics import RouterMetrics
from paceline.router.placement import Line, Placer, PrefixLookup, Superseded
from paceline.router.request import GivenBack, Request
from paceline.router.retries import Retries
from paceline.router.suspects import Suspects, Trial
from paceline.router.worker_session import WorkerSession

log = structlog.stdlib.get_logger("paceline.router")


class Coordinator:
    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        lookup: PrefixLookup,
        metrics: RouterMetrics,
        spans: Tracing = tracing.OFF,
    ) -> None:
        self.queue: AdmissionQueue[Attempt] = AdmissionQueue(
            config.queue_limit, config.queue_tokens
        )
        self.draining = False
        self._config = config
        self._spans = spans
        self._placer = Placer(config, fleet, lookup, random.Random())
        self._dispatcher = Dispatcher(config)
        self._measures = Measures(metrics)
        self.suspects = Suspects(fleet.has_ended, metrics.requests_quarantined.inc)
        self._retries = Retries(config.max_attempts, fleet, self.suspects, metrics)
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}  # by request id and epoch
        self._attempts: dict[tuple[str, int], set[Attempt]] = {}
        fleet.on_change = self.queue.wake
        fleet.on_lost = self.suspects.note_lost

    @property
    def decisions(self) -> DecisionLog:
        return self._placer.decisions

    @property
    def num_in_flight(self) -> int:
        return len(self._tasks)

    def num_queued_by_digest(self) -> dict[str, int]:
        """What waits for workers of a revision."""
        found: Counter[str] = Counter()
        for group, count in self.queue.num_by_group.items():
            digest, _ = cast("tuple[str, bool]", group)  # of Line
            found[digest] += count
        return found

    def submit(self, request: Request, on_end: Callable[[], object]) -> None:
        """Takes a request on; `on_end` is called when it has ended.

        Raises GivenBack, Overloaded, Unavailable, InvalidRequest, ContextLengthExceeded,
        ModelNotFound or RequestQuarantined.
        """
        if self.draining:
            raise _shutting_down()
        if request.key in self._tasks:
            raise InvalidRequest("request_id", request.request_id, "is in use")
        digest = self._placer.digest_of(request)
        self.suspects.quarantine.check(request)
        turn = request.turn(self.queue.next_arrival())
        if not request.had_turn:  # else it is let in: its client would see a stream break off
            self.queue.make_room(turn)
        if request.lost_before:
            self.suspects.note(request, request.lost_before)
        self._attempts[request.key] = set()
        if traceparent := request.message.traceparent:
            request.span = self._spans.start(tracing.ROUTE, traceparent, is_entry=True)
        task = asyncio.create_task(self._serve(Line(request, digest, tuple(request.logs), turn)))
        self._tasks[request.key] = task
        task.add_done_callback(lambda _: self._forget(request.key, on_end))

    def cancel(self, request: Request, choices: set[int]) -> None:
        """The client wants these choices no more, or nothing more (none named)."""
        open_choices = set(request.unfinished(tuple(request.logs)))
        if not choices or open_choices <= choices:
            if task := self._tasks.get(request.key):
                task.cancel()
            return
        for choice in choices & open_choices:
            request.logs[choice].finished = True
        for attempt in self._attempts.get(request.key, ()):
            attempt.cancel(choices & open_choices)

    async def drain(self, timeout_s: float) -> None:
        """Takes no more requests and waits for those that run, then gives the rest back."""
        self.draining = True
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _forget(self, key: tuple[str, int], on_end: Callable[[], object]) -> None:
        del self._tasks[key]
        del self._attempts[key]
        on_end()

    async def _serve(self, line: Line) -> None:
        request, outcome = line.request, "completed"
        try:
            async with asyncio.timeout_at(request.deadline):
                await self._run(line)
        except TimeoutError:
            outcome = "deadline"
            request.sink.fail(request.slot, DeadlineExceeded("the request's time is over"))
        except PacelineError as error:
            outcome = error.code
            request.sink.fail(request.slot, error)
        except asyncio.CancelledError:
            outcome = "cancelled"
            if self.draining:
                request.sink.fail(request.slot, _shutting_down())
        except Exception:  # a bug of ours ends this request, and no other
            outcome = "bug"
            tenant = tenant_digest(self._config.secret.encode(), request.message.tenant)
            log.exception("request failed", request_ids=[request.request_id], tenant=tenant)
            request.sink.fail(request.slot, EngineFailure("internal error"))
        finally:
            self._measures.request_ended(request, outcome, asyncio.get_running_loop().time())
            request.span.end(error="" if outcome == "completed" else outcome)

    async def _run(self, line: Line) -> None:
        """Attempts until the choices of `line` are done. Raises what ends the request."""
        while line.choices:
            trial = await self.suspects.trial(line.request)
            try:
                is_over = await self._run_once(line, trial)
            finally:
                trial.end()
            if is_over:
                return
            if len(line.choices) > 1 and line.request.has_output:
                await self._run_apart(line)
                return

    async def _run_once(self, line: Line, trial: Trial) -> bool:
        """One attempt. False: another one has to follow. Raises what ends the request."""
        request, place = line.request, functools.partial(self._placer.place, line)
        waiting = self._spans.start(tracing.QUEUE, request.span.traceparent)
        try:
            attempt = await self.queue.wait(
                line.group, line.turn, place, comes_back=request.had_turn
            )
        except Superseded as other:
            self._placer.move(line, other.digest)
            return False
        except Cancelled:
            return True  # while it waited
        finally:
            waiting.end()
        request.note_placed()
        if line.was_busy:
            self.queue.num_asking += 1
            attempt.reserved.add_done_callback(self._has_asked)
        attempt.begin_span(self._spans)
        attempt.on_proof = functools.partial(self._prove, request, attempt.sessions, trial)
        try:
            failure = await self._try(line, attempt)
        finally:
            attempt.close()
        if failure is None:
            self._prove(request, attempt.sessions, trial)
            self._retries.budget.earn()
            return True
        await self._retries.prepare(line, attempt, failure, self.num_in_flight)
        return False

    def _has_asked(self, _: asyncio.Future[int]) -> None:
        self.queue.num_asking -= 1

    def _prove(self, request: Request, sessions: list[WorkerSession], trial: Trial) -> None:
        """It gets on, or has ended: no worker dies of it, and these are well."""
        for session in sessions:
            session.health.succeed()
        self.suspects.acquit(request)
        trial.end()

    async def _run_apart(self, line: Line) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for part in line.split():
                    group.create_task(self._run(part))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _try(self, line: Line, attempt: Attempt) -> PacelineError | Busy | None:
        attempts = self._attempts[line.request.key]
        attempts.add(attempt)
        try:
            await self._dispatcher.drive(attempt)
        except (PacelineError, Busy) as failure:
            return failure
        finally:
            attempts.discard(attempt)
            self._measures.attempt_ended(attempt)
            self._placer.learn(attempt)
        return None


def _shutting_down() -> GivenBack:
    return GivenBack("the router is shutting down", retry_after_s=1)
