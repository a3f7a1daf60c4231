"""What follows an attempt that failed: another one, at once or after a pause, or the request's end.

Not a failure: the worker had no room (Busy), or asked for the request to go elsewhere. Any other
one costs one of `max_attempts`, speaks against workers, and has to be within the budget of retries.
"""

import asyncio
import random

from paceline.core.errors import EngineFailure, ErrorCode, Overloaded, PacelineError, Unavailable
from paceline.router.attempt import Attempt, Busy, Moved
from paceline.router.fleet import Fleet
from paceline.router.metrics import RouterMetrics
from paceline.router.placement import Line
from paceline.router.retry_budget import RetryBudget
from paceline.router.suspects import Suspects
from paceline.router.worker_session import GivenUp

FINAL = frozenset(
    {
        ErrorCode.INVALID_REQUEST,
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.DEADLINE_EXCEEDED,
    }
)
NOT_OF_A_WORKER = frozenset({ErrorCode.INCOMPATIBLE_PEER, ErrorCode.OVERLOADED})
PAUSE_S = (0.02, 0.5)  # before the third attempt, and at most; it doubles, with jitter


class Retries:
    def __init__(
        self, max_attempts: int, fleet: Fleet, suspects: Suspects, metrics: RouterMetrics
    ) -> None:
        self.budget = RetryBudget(asyncio.get_running_loop().time())
        self._max_attempts = max_attempts
        self._fleet = fleet
        self._suspects = suspects
        self._metrics = metrics

    async def prepare(
        self, line: Line, attempt: Attempt, failure: PacelineError | Busy, num_in_flight: int
    ) -> None:
        """Returns when the next attempt may begin, or raises the error that is final."""
        if isinstance(failure, Moved):
            return
        if isinstance(failure, Busy | Overloaded):
            self._metrics.busy.inc()
            line.was_busy = True
            if attempt.failed_at is not None:
                attempt.failed_at.session.note_busy(asyncio.get_running_loop().time())
            return
        if failure.code in FINAL:
            raise failure
        has_output = line.request.has_output
        self._metrics.replans.labels(failure.code).inc()
        self._metrics.migrations.labels(failure.code).inc(has_output)
        if isinstance(failure, GivenUp) and line.may_move():
            return
        self._note(line, attempt, failure)
        if line.num_failures >= self._max_attempts:
            await self._suspects.judge(line.request)
            raise _final(failure)
        is_free = attempt.worker_is_lost and line.num_failures == 1  # the move away from it
        now = asyncio.get_running_loop().time()
        if not is_free and not self.budget.take(now, num_in_flight, has_output=has_output):
            self._metrics.retries_refused.inc()
            raise _final(failure)
        await asyncio.sleep(_pause_s(line.num_failures))

    def _note(self, line: Line, attempt: Attempt, failure: PacelineError) -> None:
        """Tells all who learn from it, the gateway too."""
        request = line.request
        line.note_failure(attempt, failure)
        request.sink.set_back(request.slot, line.num_failures, attempt.lost)
        if attempt.lost is not None:
            self._suspects.note(request, [attempt.lost], attempt.opened_at)
        if failure.code not in NOT_OF_A_WORKER:
            self._fleet.note_failures(attempt.guilty(failure), asyncio.get_running_loop().time())


def _pause_s(num_failures: int) -> float:
    """None before the second attempt, which goes elsewhere."""
    first_s, most_s = PAUSE_S
    usual_s = min(most_s, first_s * 2.0 ** (num_failures - 2)) if num_failures > 1 else 0.0
    return usual_s * random.uniform(0.5, 1.5)


def _final(failure: PacelineError) -> PacelineError:
    """What the client is told after the last attempt: nothing about whose fault it was."""
    if failure.code == ErrorCode.INTERNAL:
        return EngineFailure("the request failed on every worker that tried it")
    return Unavailable("the request could not be completed now", retry_after_s=1)
