"""What is counted of attempts and requests when they end, and how well plans foresaw it."""

from paceline.core.errors import ErrorCode
from paceline.router.attempt import Attempt
from paceline.router.forecast import Forecast
from paceline.router.metrics import RouterMetrics
from paceline.router.request import Request


class Measures:
    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._forecast = Forecast()

    def attempt_ended(self, attempt: Attempt) -> None:
        kind = attempt.request.plan_kind = type(attempt.plan).__name__.lower()
        self._metrics.plans.labels(kind).inc()
        if attempt.num_cached_tokens is not None:
            self._metrics.cached_predicted.inc(attempt.num_predicted_tokens)
            self._metrics.cached_real.inc(attempt.num_cached_tokens)
        if attempt.reserved_s is not None:
            self._metrics.admission.observe(attempt.reserved_s)
        if attempt.prompt_s is not None and attempt.cost is not None:
            worker_id = attempt.compute.session.worker_id
            error = self._forecast.error(worker_id, attempt.cost, attempt.prompt_s)
            if error is not None:
                self._metrics.planner_error.observe(error)

    def request_ended(self, request: Request, outcome: ErrorCode | str, now: float) -> None:
        """`outcome`: the code of its error, or one of OUTCOMES."""
        self._metrics.requests.labels(outcome).inc()
        if kind := request.plan_kind:
            for hope, is_kept in request.hopes_kept(now):
                self._metrics.hopes.labels(hope, kind, "yes" if is_kept else "no").inc()
        trace_id = request.span.trace_id
        exemplar = {"trace_id": trace_id} if trace_id else None
        first, second = request.first_token_at, request.second_token_at
        if first is not None:
            self._metrics.ttft.observe(first - request.created_at, exemplar)
            if second is not None:
                self._metrics.token2_gap.observe(second - first, exemplar)
