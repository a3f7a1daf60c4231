"""The router's metrics, on a registry of its own."""

from grpc import StatusCode
from prometheus_client import CollectorRegistry

from paceline import __version__
from paceline.core import metrics as names
from paceline.core.errors import ErrorCode

OUTCOMES = ("completed", "deadline", "cancelled", "bug")
LOST_BY = ("drained", "closed", "refused", "silent", "stalled", "failed", "outbox")


class RouterMetrics:
    """Gauges are set by their owners; sums over workers are labelled by worker id.

    Counters with known labels begin at 0: an increase from nothing would not be seen.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        codes = [code.value for code in ErrorCode]
        names.SERVICE_INFO.gauge(registry).labels("router", __version__).set(1)
        self.queue_length = names.ROUTER_QUEUE_LENGTH.gauge(registry)
        self.in_flight = names.ROUTER_IN_FLIGHT.gauge(registry)
        self.requests = names.ROUTER_REQUESTS.counter(registry)
        self.plans = names.ROUTER_PLANS.counter(registry)
        self.hopes = names.ROUTER_HOPES.counter(registry)
        self.replans = names.ROUTER_REPLANS.counter(registry)
        self.migrations = names.ROUTER_MIGRATIONS.counter(registry)
        self.admission = names.ROUTER_ADMISSION_SECONDS.histogram(registry)
        self.planner_error = names.ROUTER_PLANNER_ERROR.histogram(registry)
        self.requests_quarantined = names.ROUTER_REQUESTS_QUARANTINED.counter(registry)
        self.busy = names.ROUTER_BUSY.counter(registry)
        self.cached_predicted = names.ROUTER_CACHED_TOKENS_PREDICTED.counter(registry)
        self.cached_real = names.ROUTER_CACHED_TOKENS_REAL.counter(registry)
        self.index_keys = names.ROUTER_INDEX_KEYS.gauge(registry)
        self.index_bytes = names.ROUTER_INDEX_BYTES.gauge(registry)
        self.resyncs = names.ROUTER_INDEX_RESYNCS.counter(registry)
        self.diverged = names.ROUTER_INDEX_DIVERGED.counter(registry)
        self.redis_up = names.ROUTER_REDIS_UP.gauge(registry)
        self.refused = names.ROUTER_REFUSED_RECORDS.counter(registry)
        self.late = names.ROUTER_LATE_FRAMES.counter(registry)
        self.worker_up = names.ROUTER_WORKER_UP.gauge(registry)
        self.revision_workers = names.ROUTER_REVISION_WORKERS.gauge(registry)
        self.worker_in_flight = names.ROUTER_WORKER_IN_FLIGHT.gauge(registry)
        self.worker_lost = names.ROUTER_WORKER_LOST.counter(registry)
        self.quarantined = names.ROUTER_WORKERS_QUARANTINED.gauge(registry)
        self.ejected = names.ROUTER_WORKERS_EJECTED.gauge(registry)
        self.retries_refused = names.ROUTER_RETRIES_REFUSED.counter(registry)
        self.ttft = names.ROUTER_TTFT_SECONDS.histogram(registry)
        self.token2_gap = names.ROUTER_TOKEN2_GAP_SECONDS.histogram(registry)
        for outcome in (*OUTCOMES, *codes):
            self.requests.labels(outcome)
        for code in codes:
            self.replans.labels(code)
            self.migrations.labels(code)
        for kind in ("whole", "split"):
            self.plans.labels(kind)
            for hope in ("ttft", "itl"):
                self.hopes.labels(hope, kind, "yes")
                self.hopes.labels(hope, kind, "no")
        for reason in (*LOST_BY, *(status.name.lower() for status in StatusCode)):
            self.worker_lost.labels(reason)
