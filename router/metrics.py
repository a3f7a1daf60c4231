"""The router's metrics, on a registry of its own."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paceline.core import metrics as names

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_GAP_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5)


class RouterMetrics:
    """Gauges are set by their owners; sums over workers are labelled by worker id."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name.removesuffix("_total"), text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self.queue_length = gauge(names.ROUTER_QUEUE_LENGTH, "Requests waiting for a worker.")
        self.in_flight = gauge(names.ROUTER_IN_FLIGHT, "Requests admitted and not ended.")
        self.requests = counter(names.ROUTER_REQUESTS, "Requests by how they ended.", "outcome")
        self.plans = counter(names.ROUTER_PLANS, "Attempts by kind of plan.", "kind")
        self.replans = counter(names.ROUTER_REPLANS, "Attempts that failed, by reason.", "reason")
        self.busy = counter(names.ROUTER_BUSY, "Reservations that were refused for now.")
        self.cached_predicted = counter(
            names.ROUTER_CACHED_TOKENS_PREDICTED, "Cached prompt tokens, by the index."
        )
        self.cached_real = counter(
            names.ROUTER_CACHED_TOKENS_REAL, "Cached prompt tokens, as workers report."
        )
        self.index_keys = gauge(names.ROUTER_INDEX_KEYS, "Keys in the index.")
        self.index_bytes = gauge(names.ROUTER_INDEX_BYTES, "Memory of the index.")
        self.resyncs = counter(names.ROUTER_INDEX_RESYNCS, "Snapshots of a worker's keys.")
        self.diverged = counter(
            names.ROUTER_INDEX_DIVERGED, "Digests of workers that differ from the mirror."
        )
        self.redis_up = gauge(names.ROUTER_REDIS_UP, "1 while Redis answers.")
        self.refused = counter(
            names.ROUTER_REFUSED_RECORDS, "What was read from Redis and refused.", "reason"
        )
        self.late = counter(names.ROUTER_LATE_FRAMES, "Emissions of attempts that had ended.")
        self.worker_up = gauge(names.ROUTER_WORKER_UP, "1 while connected.", "worker", "role")
        self.worker_in_flight = gauge(names.ROUTER_WORKER_IN_FLIGHT, "Slots in use.", "worker")
        self.worker_lost = counter(names.ROUTER_WORKER_LOST, "Streams that ended.", "reason")
        self.ttft = histogram(
            names.ROUTER_TTFT_SECONDS, "Submit to first token, at the router.", _TTFT_BUCKETS
        )
        self.token2_gap = histogram(
            names.ROUTER_TOKEN2_GAP_SECONDS, "First token to second, at the router.", _GAP_BUCKETS
        )
