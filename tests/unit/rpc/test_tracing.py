"""Spans: their tree, whose they are, and what a collector that is slow or gone costs."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry

from paceline.cli.ports import free_port
from paceline.core import metrics as names
from paceline.core import tracing
from paceline.core.errors import ConfigError
from paceline.core.tracing import NO_SPAN, OFF, Tracing, check_endpoint

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="the extra otel is missing")

from paceline.rpc import otel
from paceline.rpc.tracing import make_tracing
from tests.support.collector import Collector, collector

TRACE, PARENT = "ab" * 16, "cd" * 8
MAY_TAKE_S = 10  # in which threads get their turn on a busy machine


class Traced:
    """One process's tracing and its counters."""

    def __init__(self, endpoint: str, new_traces: float = 1.0) -> None:
        self.registry = CollectorRegistry()
        self.spans = make_tracing(endpoint, "test", self.registry, new_traces=new_traces)

    def count(self, metric: names.Metric) -> float:
        return self.registry.get_sample_value(str(metric)) or 0.0

    def make(self, number: int) -> None:
        for _ in range(number):
            self.spans.start("one", "", is_entry=True).end()


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "EVERY_MS", 20)
    monkeypatch.setattr(otel, "EXPORT_TIMEOUT_S", 0.3)


@pytest.fixture
def narrow(brisk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "MAX_WAITING", 100)
    monkeypatch.setattr(otel, "BATCH", 25)


@contextmanager
def traced(new_traces: float = 1.0) -> Iterator[tuple[Traced, Collector]]:
    """After the block all spans are at the collector."""
    with collector() as found:
        made = Traced(found.endpoint, new_traces)
        yield made, found
        made.spans.close()


def test_parts_lie_below_their_whole(brisk: None) -> None:
    with traced() as (made, found):
        whole = made.spans.start("whole", "", {tracing.MODEL: "m"}, is_entry=True)
        made.spans.record("part", whole.traceparent, 1000, 2000, error="overloaded")
        whole.end({tracing.OUTPUT_TOKENS: 3})
    (above,), (below,) = found.named("whole"), found.named("part")
    assert below.parent == above.id and above.parent == ""
    assert below.trace_id == above.trace_id == whole.trace_id
    assert (below.began_ns, below.ended_ns) == (1000, 2000)
    assert below.is_error and below.attributes == {"error.type": "overloaded"}
    assert above.attributes == {tracing.MODEL: "m", tracing.OUTPUT_TOKENS: 3}
    assert not above.is_error and above.service == "paceline-test"


def test_a_callers_trace_goes_on(brisk: None) -> None:
    with traced(new_traces=0.0) as (made, found):
        made.spans.start("whole", f"00-{TRACE}-{PARENT}-01", is_entry=True).end()
    (span,) = found.named("whole")
    assert (span.trace_id, span.parent) == (TRACE, PARENT)


@pytest.mark.parametrize(
    "wrong", ["", "x", "é", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "1" * 100_000]
)
def test_what_is_no_traceparent_begins_a_trace(brisk: None, wrong: str) -> None:
    with traced() as (made, found):
        made.spans.start("whole", wrong, is_entry=True).end()
    (span,) = found.named("whole")
    assert span.parent == "" and span.trace_id != TRACE


def test_nobody_records_what_is_not_sampled(brisk: None) -> None:
    with traced(new_traces=0.0) as (made, found):
        for parent in ("", f"00-{TRACE}-{PARENT}-00"):
            span = made.spans.start("whole", parent, is_entry=True)
            assert span is NO_SPAN and span.traceparent == span.trace_id == ""
            made.spans.record("part", span.traceparent, 1, 2)
            made.spans.start("part", span.traceparent).end()
    assert found.spans == []


def test_a_share_of_new_requests_is_traced(brisk: None) -> None:
    with traced(new_traces=0.5) as (made, found):
        made.make(200)
    assert 50 < len(found.spans) < 150


def test_a_dead_collector_costs_counted_spans(narrow: None) -> None:
    made = Traced(f"http://127.0.0.1:{free_port('127.0.0.1')}")
    made.make(500)
    assert made.count(names.TRACE_SPANS_DROPPED) >= 300  # of the others some may have failed
    began = time.monotonic()
    made.spans.close()
    assert time.monotonic() - began < otel.CLOSE_S + MAY_TAKE_S
    limit = time.monotonic() + MAY_TAKE_S
    while made.count(names.TRACE_SPANS_DROPPED) < 500 and time.monotonic() < limit:
        time.sleep(0.02)
    assert made.count(names.TRACE_SPANS_DROPPED) == 500
    assert made.count(names.TRACE_SPANS_EXPORTED) == 0


def test_a_slow_collector_gets_what_fits(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "EXPORT_TIMEOUT_S", 5.0)
    with traced() as (made, found):
        found.delay_s = 0.1
        made.make(1000)
    exported, dropped = (
        made.count(metric) for metric in (names.TRACE_SPANS_EXPORTED, names.TRACE_SPANS_DROPPED)
    )
    assert exported + dropped == 1000 and dropped > 0
    assert len(found.spans) == exported > 0


@pytest.mark.parametrize("wrong", ["collector:4317", "http://", "http://host", "ftp://host:1"])
def test_a_wrong_endpoint_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"otlp_endpoint=.* must be of the form"):
        check_endpoint("otlp_endpoint", wrong)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    check_endpoint("otlp_endpoint", "")
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[otel\]'"):
        check_endpoint("otlp_endpoint", "http://127.0.0.1:4317")


def test_it_is_off_and_not_even_imported_unless_asked_for() -> None:
    assert make_tracing("", "test", CollectorRegistry(), new_traces=1.0) is OFF
    assert type(OFF) is Tracing and OFF.start("one", "", is_entry=True) is NO_SPAN
    modules = "paceline.router.config, paceline.gateway.serving"
    code = f"import sys, {modules}; sys.exit('paceline.rpc.otel' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
