"""What operators see of requests: those that run and the last that ended.

Ids, counts, times and workers; never a prompt, a text, a key, or a tenant's name.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from paceline.core import tracing
from paceline.core.tracing import NO_SPAN, Attributes, Span, Tracing, Value
from paceline.gateway.statistics import RequestTimes
from paceline.v1.common_pb2 import Placement

MAX_ENDED = 256  # kept; of those that run, the oldest so many are shown
MAX_PLACEMENTS = 8  # of a request: its last attempts
RUNNING = "running"
COMPLETED = "completed"

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """How a request came in."""

    operation: str = "text_completion"  # as OpenTelemetry names it; or "chat"
    traceparent: str = ""  # the caller's, unchecked


class RequestRecord:
    """Filled in by the generation of the request, whose `times` it shares."""

    __slots__ = (
        "model",
        "num_cached_tokens",
        "num_choices",
        "num_output_tokens",
        "num_prompt_tokens",
        "origin",
        "outcome",
        "placements",
        "request_ids",
        "span",
        "tenant",
        "times",
    )

    def __init__(self, origin: Origin, model: str, tenant: str, times: RequestTimes) -> None:
        self.origin = origin
        self.model = model
        self.tenant = tenant  # its digest
        self.times = times
        self.request_ids: list[str] = []  # as router, workers and logs know them, one a prompt
        self.num_prompt_tokens = self.num_choices = 0
        self.num_cached_tokens = self.num_output_tokens = 0
        self.placements: deque[Placement] = deque(maxlen=MAX_PLACEMENTS)
        self.outcome = RUNNING  # then COMPLETED, or the code of an error
        self.span: Span = NO_SPAN

    def fields(self, now_s: float) -> Fields:
        """As JSON."""
        times = self.times
        return {
            "request_ids": self.request_ids,
            "trace_id": self.span.trace_id,
            "operation": self.origin.operation,
            "model": self.model,
            "tenant": self.tenant,
            "outcome": self.outcome,
            "arrived_unix_ms": round(1000 * (time.time() - (now_s - times.arrived_s))),
            "total_ms": _ms(now_s - times.arrived_s),
            "ttft_ms": None if times.first_s is None else _ms(times.first_s - times.arrived_s),
            "stages_ms": {name: _ms(seconds) for name, seconds in times.stages().items()},
            "attempts": [
                {"attempt": p.attempt, "prefill": p.prefill_worker, "decode": p.decode_worker}
                for p in self.placements
            ],
            "choices": self.num_choices,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
        }

    @property
    def exemplar(self) -> dict[str, str] | None:
        """By which a metric points to the trace."""
        return {"trace_id": self.span.trace_id} if self.span is not NO_SPAN else None

    def begin_span(self, spans: Tracing, now_s: float) -> None:
        """From the arrival on."""
        if spans.is_on:
            self.span = spans.start(
                f"{self.origin.operation} {self.model}",
                self.origin.traceparent,
                began_ns=self._unix_ns(self.times.arrived_s, now_s),
                is_entry=True,
            )

    def end_span(self, spans: Tracing, now_s: float) -> None:
        if self.span is NO_SPAN:
            return
        times = self.times
        if times.is_sent:
            began, ended = (self._unix_ns(at_s, now_s) for at_s in (times.arrived_s, times.sent_s))
            spans.record(tracing.PREPARE, self.span.traceparent, began, ended)
        failed = self.outcome != COMPLETED
        self.span.end(self._attributes(), self.outcome if failed else "")

    def _attributes(self) -> Attributes:
        times = self.times
        found: dict[str, Value] = {
            tracing.OPERATION: self.origin.operation,
            tracing.PROVIDER: "paceline",
            tracing.MODEL: self.model,
            tracing.NUM_CHOICES: self.num_choices,
            tracing.INPUT_TOKENS: self.num_prompt_tokens,
            tracing.CACHED_TOKENS: self.num_cached_tokens,
            tracing.OUTPUT_TOKENS: self.num_output_tokens,
            tracing.REQUEST_ID: tuple(self.request_ids),
            tracing.TENANT: self.tenant,
        }
        if times.first_s is not None:
            found[tracing.TTFT] = times.first_s - times.arrived_s
        return found

    def _unix_ns(self, at_s: float, now_s: float) -> int:
        return time.time_ns() - round(1e9 * (now_s - at_s))


class RequestLog:
    """Bounded; a request costs it a dict."""

    def __init__(self) -> None:
        self._ended: deque[Fields] = deque(maxlen=MAX_ENDED)

    def ended(self, fields: Fields) -> None:
        self._ended.append(fields)

    def page(self, running: Iterable[Fields]) -> bytes:
        """JSON: {"running": the oldest first, "ended": the latest first, "num_running": …}."""
        oldest = sorted(running, key=lambda fields: float(fields["arrived_unix_ms"]))
        shown = {
            "num_running": len(oldest),
            "running": oldest[:MAX_ENDED],
            "ended": list(reversed(self._ended)),
        }
        return orjson.dumps(shown)


def _ms(seconds: float) -> float:
    return round(1000 * max(0.0, seconds), 3)
