"""The table of metrics against what each service's registry really holds."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from deploy.observability.metrics_page import with_table
from paceline.cli.rebalance import RebalanceConfig, Rebalancer
from paceline.core import metrics as names
from paceline.core.metric_labels import LABELS
from paceline.engine.messages import Load
from paceline.gateway import metrics as gateway_metrics
from paceline.gateway.metrics import GatewayMetrics
from paceline.kv_transfer.tiers.base import Tier
from paceline.router.metrics import RouterMetrics
from paceline.rpc.exposition import exposition
from paceline.worker.metrics import WorkerMetrics
from paceline.worker.tier_metrics import TierMetrics

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
# What routers and autoscalers read of an engine, with the labels that they look for.
READ_OF_ENGINES = {
    "vllm:num_requests_running": ("model_name", "engine"),
    "vllm:num_requests_waiting": ("model_name", "engine"),
    "vllm:num_requests_waiting_by_reason": ("model_name", "engine", "reason"),
    "vllm:kv_cache_usage_perc": ("model_name", "engine"),
    "vllm:lora_requests_info": ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
}
HISTOGRAMS_OF_VLLM = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_time_per_output_token_seconds", "request_queue_time_seconds"),
    *("request_inference_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_params_n", "request_params_max_tokens"),
)


def registries() -> dict[str, CollectorRegistry]:
    worker = WorkerMetrics("m", "decode")
    tiers: list[Tier] = []
    worker.registry.register(TierMetrics(tiers))
    return {
        "gateway": GatewayMetrics().registry,
        "router": RouterMetrics().registry,
        "worker": worker.registry,
        "rebalance": Rebalancer(RebalanceConfig(secret="s" * 16)).registry,
    }


def families(registry: CollectorRegistry) -> dict[str, str]:
    """Types by exported name."""
    found = {}
    for family in registry.collect():
        end = "_total" if family.type == "counter" else ""
        found[f"{family.name}{end}"] = family.type
    return found


def test_services_export_the_table_and_nothing_else() -> None:
    exported = {}
    for registry in registries().values():
        exported |= families(registry)
    where_on = {names.TRACE_SPANS_EXPORTED, names.TRACE_SPANS_DROPPED}  # traces
    where_on.add(names.TLS_CERTIFICATE_EXPIRES)  # TLS
    assert exported == {str(m): m.kind for m in names.ALL if m not in where_on}


def test_openmetrics_has_the_same_series() -> None:
    for registry in registries().values():
        _, plain = exposition(registry, "text/plain")
        _, asked = exposition(registry, "application/openmetrics-text")
        assert series(openmetrics_families(asked.decode())) == series(
            text_string_to_metric_families(plain.decode())
        )


def series(found: Iterable[Metric]) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in found
        for sample in family.samples
    }


def test_no_two_services_export_the_same_metric() -> None:
    seen: set[str] = set()
    for registry in registries().values():
        mine = set(families(registry)) - {names.SERVICE_INFO}
        assert not mine & seen
        seen |= mine


def test_names_carry_their_unit_and_labels_are_known() -> None:
    for metric in names.ALL:
        assert metric.endswith("_total") == (metric.kind == "counter"), metric
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric
        assert set(metric.labels) <= set(LABELS), metric
        assert re.fullmatch(r"(vllm:|paceline_)[a-z0-9_]+", metric), metric
    used = {label for metric in names.ALL for label in metric.labels}
    assert used == set(LABELS)
    assert len(set(names.ALL)) == len(names.ALL)


def test_what_routers_autoscalers_and_dashboards_read_of_vllm_is_there() -> None:
    table = {str(metric): metric for metric in names.ALL}
    for name, labels in READ_OF_ENGINES.items():
        assert table[name].kind == "gauge" and set(labels) <= set(table[name].labels), name
    for name in HISTOGRAMS_OF_VLLM:
        metric = table[f"vllm:{name}"]
        assert (metric.kind, metric.labels) == ("histogram", ("model_name", "engine")), name


def test_counters_with_known_labels_begin_at_0() -> None:
    """Prometheus sees no increase from nothing: the first fault would raise no alert."""
    text = "".join(generate_latest(registry).decode() for registry in registries().values())
    for start in (
        'paceline_router_worker_lost_total{reason="unavailable"}',
        'paceline_router_replans_total{reason="kv_unavailable"}',
        'paceline_gateway_errors_total{code="internal"}',
        "paceline_transfer_failures_total",
        "paceline_leases_expired_total",
    ):
        assert f"\n{start} 0.0\n" in text


def test_a_worker_tells_what_those_that_wait_are_waiting_for() -> None:
    worker = WorkerMetrics("m", "decode")
    worker._observe_load(Load(1, 7, 0, 8, 8, 0, num_deferred=2))
    waiting = {
        reason: worker.registry.get_sample_value(
            names.VLLM_WAITING_BY_REASON, {"model_name": "m", "engine": "0", "reason": reason}
        )
        for reason in ("capacity", "deferred")
    }
    assert waiting == {"capacity": 5, "deferred": 2}


def test_a_model_has_all_its_series_from_its_first_request() -> None:
    gateway = GatewayMetrics()
    assert gateway.for_model("m") is gateway.for_model("m")
    series = list(text_string_to_metric_families(generate_latest(gateway.registry).decode()))
    finished = next(f for f in series if f.name == "vllm:request_success")
    reasons = {sample.labels["finished_reason"] for sample in finished.samples}
    assert reasons == {"stop", "length", "cancelled"}


def test_models_beyond_the_bound_share_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_metrics, "MAX_MODELS", 2)
    gateway = GatewayMetrics()
    for number in range(4):
        gateway.for_model(f"m{number}")
    text = generate_latest(gateway.registry).decode()
    assert 'model_name="m1"' in text and 'model_name="m2"' not in text
    assert gateway.for_model("m2") is gateway.for_model("m3")


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "run python -m deploy.observability.build"
