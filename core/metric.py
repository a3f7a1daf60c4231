"""What a metric is: core/metrics.py lists them."""

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]

# A second series for each counter, which nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]


ALL: list["Metric"] = []  # in the order of the table


class Metric(str):
    """A name as it is exported, and what is under it. Units are in the name; counters end in
    _total."""

    __slots__ = ("buckets", "help", "kind", "labels")

    kind: Kind
    help: str
    labels: Labels
    buckets: tuple[float, ...]

    def __new__(
        cls, kind: Kind, name: str, help: str, labels: Labels = (), buckets: tuple[float, ...] = ()
    ) -> "Metric":
        metric = super().__new__(cls, name)
        metric.kind, metric.help, metric.labels, metric.buckets = kind, help, labels, buckets
        ALL.append(metric)
        return metric

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of the series behind it."""
        ends = ("_bucket", "_count", "_sum") if self.kind == "histogram" else ("",)
        return tuple(f"{self}{end}" for end in ends)

    def counter(self, registry: CollectorRegistry) -> Counter:
        return Counter(self.removesuffix("_total"), self.help, self.labels, registry=registry)

    def gauge(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self, self.help, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry) -> Histogram:
        return Histogram(self, self.help, self.labels, buckets=self.buckets, registry=registry)
