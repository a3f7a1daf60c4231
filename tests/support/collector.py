"""A collector of traces: OTLP over real gRPC, in a thread of the test."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Seen:
    """A span as it arrived."""

    def __init__(self, service_name: str, span: Span) -> None:
        self.service = service_name
        self.name = span.name
        self.trace_id, self.id, self.parent = (
            value.hex() for value in (span.trace_id, span.span_id, span.parent_span_id)
        )
        self.began_ns, self.ended_ns = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes = {item.key: _value(item.value) for item in span.attributes}
        self.is_error = span.status.code == span.status.STATUS_CODE_ERROR

    def __repr__(self) -> str:
        return f"{self.service}:{self.name}"


class Collector(service_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.delay_s = 0.0
        self.endpoint = ""
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(8))
        service_grpc.add_TraceServiceServicer_to_server(self, self._server)

    def start(self) -> None:
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: Any) -> Any:
        time.sleep(self.delay_s)
        with self._lock:
            for group in request.resource_spans:
                names = {item.key: item.value.string_value for item in group.resource.attributes}
                for scope in group.scope_spans:
                    self.spans += [Seen(names["service.name"], span) for span in scope.spans]
        return service.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Seen]:
        """In the order of their beginnings."""
        found = [span for span in list(self.spans) if span.name == name]
        return sorted(found, key=lambda span: span.began_ns)


@contextmanager
def collector() -> Iterator[Collector]:
    made = Collector()
    made.start()
    try:
        yield made
    finally:
        made.stop()


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
