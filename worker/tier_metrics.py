"""Metrics of the tiers, read from their counters when somebody asks."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core import metrics as names
from paceline.kv_transfer.tiers.base import Tier

_COUNTERS: tuple[tuple[str, str, Callable[[Tier], float]], ...] = (
    (names.TIER_HITS, "Pages found.", lambda tier: tier.figures.num_hits),
    (names.TIER_STORED, "Pages taken in.", lambda tier: tier.figures.num_stored),
    (names.TIER_EVICTIONS, "Pages given up for others.", lambda tier: tier.figures.num_evictions),
    (names.TIER_DROPPED, "Pages not taken.", lambda tier: tier.figures.num_dropped),
    (names.TIER_READ_BYTES, "Bytes read.", lambda tier: tier.statistics.figures.num_bytes),
    (names.TIER_READ_SECONDS, "Seconds of reading.", lambda tier: tier.statistics.figures.seconds),
)


class TierMetrics(Collector):
    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        held = GaugeMetricFamily(names.TIER_PAGES, "Pages held.", labels=["tier"])
        errors = CounterMetricFamily(names.TIER_ERRORS, "What failed.", labels=["tier", "cause"])
        for tier in self._tiers:
            held.add_metric([tier.name], tier.figures.num_pages)
            errors.add_metric([tier.name, "mismatch"], tier.figures.num_mismatches)
            errors.add_metric([tier.name, "store"], tier.figures.num_errors)
        yield held
        yield errors
        for name, text, value in _COUNTERS:
            family = CounterMetricFamily(name, text, labels=["tier"])
            for tier in self._tiers:
                family.add_metric([tier.name], value(tier))
            yield family
