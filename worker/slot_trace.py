"""The spans of one slot: made when it ends, from the times that it has noted.

prefill   command to first token            on the worker that computes the prompt
pull      first copy to last verified one   on the worker that reads
decode    KV is here to the slot's end      on the worker that emits the rest
"""

import time

from paceline.core import tracing
from paceline.core.errors import ErrorCode
from paceline.core.tracing import Attributes, Tracing


class SlotTrace:
    """Of a slot whose request is traced. Times are Unix time in nanoseconds; 0: did not happen."""

    __slots__ = (
        "_first_ns",
        "_opened_ns",
        "_parent",
        "_pull_began_ns",
        "_pull_busy_s",
        "_pull_ended_ns",
        "_source",
        "_spans",
        "error",
    )

    def __init__(self, spans: Tracing, traceparent: str) -> None:
        self._spans = spans
        self._parent = traceparent
        self._opened_ns = time.time_ns()
        self._first_ns = self._pull_began_ns = self._pull_ended_ns = 0
        self._pull_busy_s = 0.0
        self._source = ""  # it adopts from this worker
        self.error = ""  # code of what ended it

    def adopts(self, source: str) -> None:
        self._source = source

    def emitted_first(self) -> None:
        self._first_ns = time.time_ns()

    def pulled(self, took_s: float) -> None:
        """A range, until now."""
        self._pull_ended_ns = time.time_ns()
        self._pull_busy_s += took_s
        if not self._pull_began_ns:
            self._pull_began_ns = self._pull_ended_ns - round(took_s * 1e9)

    def ended(self, *, is_reservation: bool, decodes: bool) -> None:
        """`is_reservation`: its KV came from elsewhere; `decodes`: it goes on here after its first
        token, or would have."""
        now = time.time_ns()
        first = self._first_ns or now
        failed = "" if self._first_ns else self.error or ErrorCode.CANCELLED.value
        if self._pull_began_ns:
            pull: Attributes = {
                tracing.SOURCE_WORKER: self._source,
                tracing.PULL_BUSY: self._pull_busy_s,
            }
            bounds = self._pull_began_ns, self._pull_ended_ns
            self._spans.record(tracing.PULL, self._parent, *bounds, pull, failed)
        if not is_reservation:
            self._spans.record(tracing.PREFILL, self._parent, self._opened_ns, first, error=failed)
        if self._first_ns and decodes:
            began = self._pull_ended_ns or first
            self._spans.record(tracing.DECODE, self._parent, began, now, error=self.error)
