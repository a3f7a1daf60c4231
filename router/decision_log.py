"""The last decisions of the router, with what was considered, for `paceline explain`."""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.router.planner import Job, Plan, Whole
from paceline.router.request import Request
from paceline.v1 import control_pb2

MAX_DECISIONS = 256


@dataclass(frozen=True, slots=True)
class Decision:
    unix_s: float
    request_id: str
    attempt: int
    model: str
    job: Job
    plan: Plan

    def to_proto(self) -> control_pb2.Decision:
        plan = self.plan
        prefill, decode = (
            (plan.worker, plan.worker) if isinstance(plan, Whole) else (plan.prefill, plan.decode)
        )
        message = control_pb2.Decision(
            unix_ms=round(self.unix_s * 1000),
            request_id=self.request_id,
            attempt=self.attempt,
            model=self.model,
            num_tokens=self.job.num_tokens,
            num_remaining=self.job.num_remaining,
            prefill_worker=prefill.worker_id,
            decode_worker="" if decode.is_prefill else decode.worker_id,
        )
        for candidate, cost in plan.considered:
            message.considered.add(
                worker_id=candidate.worker_id,
                is_prefill=candidate.is_prefill,
                num_cached_tokens=candidate.num_cached_tokens,
                **cost._asdict(),
            )
        return message


class DecisionLog:
    """Bounded; to note a decision costs a microsecond."""

    def __init__(self) -> None:
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)

    def note(self, request: Request, job: Job, plan: Plan) -> None:
        """Of the attempt that is about to be made."""
        attempt, model = request.next_attempt, request.message.model
        self._decisions.append(Decision(time.time(), request.request_id, attempt, model, job, plan))

    def last(self, num_decisions: int, request_id: str = "") -> list[Decision]:
        """Oldest first. `request_id`: of this request alone."""
        wanted: Iterator[Decision] = (
            d for d in reversed(self._decisions) if request_id in ("", d.request_id)
        )
        return list(itertools.islice(wanted, num_decisions))[::-1]
