"""Requests while routers work on them: who runs, how each ended, and what operators are told."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from paceline.core.errors import EngineFailure, ErrorCode, PacelineError
from paceline.core.tracing import Tracing
from paceline.gateway.deadline import Deadline
from paceline.gateway.embedding_run import EmbeddingRun
from paceline.gateway.generation import Generation
from paceline.gateway.metrics import now_s
from paceline.gateway.request_log import COMPLETED, RequestLog

Run = Generation | EmbeddingRun

logger = structlog.stdlib.get_logger("paceline.gateway")


class Runs:
    """`log_requests`: a line for each that has ended."""

    def __init__(self, spans: Tracing, *, log_requests: bool) -> None:
        self._spans = spans
        self._log_requests = log_requests
        self._running: dict[Run, None] = {}  # the oldest first
        self._log = RequestLog()

    @contextmanager
    def during(self, run: Run, deadline: Deadline) -> Iterator[None]:
        """Closes `run` when the block is left. A bug that is met in it is told to operators, and is
        an EngineFailure from there on: the caller gets no traceback."""
        self._running[run] = None
        failure: PacelineError | None = None
        try:
            yield
        except PacelineError as error:
            failure = error
            raise
        except Exception:
            ids, tenant = run.record.request_ids, run.record.tenant
            logger.exception("request failed", request_ids=ids, tenant=tenant)
            failure = EngineFailure("internal error")
            raise failure from None
        finally:
            self._end(run, _outcome(run, failure, deadline))

    def fail_all(self, error: PacelineError) -> None:
        for run in list(self._running):
            run.fail(error)

    def page(self) -> bytes:
        """JSON of what runs and what has ended of late."""
        now = now_s()
        return self._log.page(run.record.fields(now) for run in self._running)

    def _end(self, run: Run, outcome: str) -> None:
        run.close()
        del self._running[run]
        record, now = run.record, now_s()
        record.outcome = outcome
        record.end_span(self._spans, now)
        fields = record.fields(now)
        self._log.ended(fields)
        if self._log_requests:
            logger.info("request ended", **fields)


def _outcome(run: Run, failure: PacelineError | None, deadline: Deadline) -> str:
    """Of one that is not closed yet."""
    if failure is not None:
        return failure.code.value
    if run.done:
        return COMPLETED
    # Somebody has cancelled it: who keeps the deadline, or else its client.
    return (ErrorCode.DEADLINE_EXCEEDED if deadline.is_over else ErrorCode.CANCELLED).value
