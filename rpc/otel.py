"""Tracing by OpenTelemetry's SDK. Imported only where an endpoint is set: it takes 0.3 s."""

import logging
import threading
from collections.abc import Sequence
from typing import Any

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    StatusCode,
    format_span_id,
    format_trace_id,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter

from paceline import __version__
from paceline.core import metrics as names
from paceline.core.tracing import ERROR_TYPE, NO_ATTRIBUTES, NO_SPAN, Attributes, Span, Tracing

MAX_WAITING = 8192  # spans; a thousand requests through the split path
BATCH = 512
EVERY_MS = 1000
EXPORT_TIMEOUT_S = 5.0  # of a batch, repetitions included; then it is dropped
CLOSE_S = 2.0  # that the last spans may take

log = structlog.stdlib.get_logger("paceline.tracing")
_propagator = TraceContextTextMapPropagator()


class OtelTracing(Tracing):
    """Spans begin and end on one thread."""

    is_on = True

    def __init__(
        self,
        endpoint: str,
        service: str,
        registry: CollectorRegistry,
        *,
        instance: str,
        new_traces: float,
    ) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line for each batch
        resource = {"service.name": f"paceline-{service}", "service.version": __version__}
        if instance:
            resource["service.instance.id"] = instance
        self._exporter = CountingExporter(
            OTLPSpanExporter(
                endpoint, insecure=endpoint.startswith("http:"), timeout=EXPORT_TIMEOUT_S
            ),
            names.TRACE_SPANS_EXPORTED.counter(registry),
            names.TRACE_SPANS_DROPPED.counter(registry),
        )
        self._provider = TracerProvider(
            resource=Resource.create(resource),
            sampler=ParentBased(TraceIdRatioBased(new_traces)),
            shutdown_on_exit=False,  # that would wait for a dead collector
        )
        exporter: Any = self._exporter  # has what a SpanExporter has
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=2 * MAX_WAITING,  # never full: those that wait are counted before
                schedule_delay_millis=EVERY_MS,
                max_export_batch_size=BATCH,
            )
        )
        self._tracer = self._provider.get_tracer("paceline", __version__)

    def start(
        self,
        name: str,
        parent: str,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        began_ns: int | None = None,
        is_entry: bool = False,
    ) -> Span:
        if not (parent or is_entry):
            return NO_SPAN
        span = self._tracer.start_span(
            name,
            context=_propagator.extract({"traceparent": parent}),
            kind=SpanKind.SERVER if is_entry else SpanKind.INTERNAL,
            attributes=attributes,
            start_time=began_ns,
        )
        return OtelSpan(self._exporter, span) if span.is_recording() else NO_SPAN

    def record(
        self,
        name: str,
        parent: str,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes = NO_ATTRIBUTES,
        error: str = "",
    ) -> None:
        if parent:
            span = self.start(name, parent, attributes, began_ns=began_ns)
            if isinstance(span, OtelSpan):
                span.end_at(max(began_ns, ended_ns), NO_ATTRIBUTES, error)

    def close(self) -> None:
        """In a thread that nobody waits for longer: the SDK would wait half a minute."""
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        self._exporter.shutdown()


class OtelSpan(Span):
    """One that is recorded."""

    __slots__ = ("_exporter", "_span")

    def __init__(self, exporter: "CountingExporter", span: SdkSpan) -> None:
        self._exporter = exporter
        self._span = span

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{format_span_id(self._context.span_id)}-01"

    @property
    def trace_id(self) -> str:
        shown: str = format_trace_id(self._context.trace_id)
        return shown

    def end(self, attributes: Attributes = NO_ATTRIBUTES, error: str = "") -> None:
        self.end_at(None, attributes, error)

    def end_at(self, ended_ns: int | None, attributes: Attributes, error: str) -> None:
        if not self._exporter.has_room():
            return
        for key, value in attributes.items():
            self._span.set_attribute(key, value)
        if error:
            self._span.set_attribute(ERROR_TYPE, error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end(ended_ns)

    @property
    def _context(self) -> SpanContext:
        return self._span.get_span_context()


class CountingExporter:
    """A SpanExporter that knows how many spans wait for it, and counts what becomes of them."""

    def __init__(self, inner: OTLPSpanExporter, exported: Counter, dropped: Counter) -> None:
        self._inner = inner
        self._exported = exported
        self._dropped = dropped
        self._num_ended = 0  # written where spans end
        self._num_taken = 0  # written by the thread that exports
        self._works = True
        self._is_shut = False

    def has_room(self) -> bool:
        """For a span that ends now; one that has none is dropped."""
        if self._num_ended - self._num_taken >= MAX_WAITING:
            self._dropped.inc()
            return False
        self._num_ended += 1
        return True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._num_taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            works = result is SpanExportResult.SUCCESS
            (self._exported if works else self._dropped).inc(len(spans))
            if works != self._works and not self._is_shut:
                self._works = works
                say = log.info if works else log.warning
                say("the collector takes spans" if works else "the collector takes no spans")
        return result

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True  # it keeps nothing

    def shutdown(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            self._inner.shutdown()
