"""Metrics of the tiers, read from their counters when somebody asks."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core import metrics as names
from paceline.kv_transfer.tiers.base import Tier

_COUNTERS: tuple[tuple[names.Metric, Callable[[Tier], float]], ...] = (
    (names.TIER_HITS, lambda tier: tier.figures.num_hits),
    (names.TIER_STORED, lambda tier: tier.figures.num_stored),
    (names.TIER_EVICTIONS, lambda tier: tier.figures.num_evictions),
    (names.TIER_DROPPED, lambda tier: tier.figures.num_dropped),
    (names.TIER_READ_BYTES, lambda tier: tier.statistics.figures.num_bytes),
    (names.TIER_READ_SECONDS, lambda tier: tier.statistics.figures.seconds),
)


class TierMetrics(Collector):
    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            names.TIER_PAGES, names.TIER_PAGES.help, labels=names.TIER_PAGES.labels
        )
        errors = CounterMetricFamily(
            names.TIER_ERRORS, names.TIER_ERRORS.help, labels=names.TIER_ERRORS.labels
        )
        for tier in self._tiers:
            held.add_metric([tier.name], tier.figures.num_pages)
            errors.add_metric([tier.name, "mismatch"], tier.figures.num_mismatches)
            errors.add_metric([tier.name, "store"], tier.figures.num_errors)
        yield held
        yield errors
        for metric, value in _COUNTERS:
            family = CounterMetricFamily(metric, metric.help, labels=metric.labels)
            for tier in self._tiers:
                family.add_metric([tier.name], value(tier))
            yield family
