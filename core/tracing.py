"""Spans of requests for an OpenTelemetry collector; nothing at all unless an endpoint is set.

    gateway   chat MODEL ─ prepare
    router       └ route ─ queue, attempt ─ queue, attempt …        an attempt that failed says why
    workers                          └ prefill, pull, decode

The context travels as a W3C traceparent: in the HTTP header or gRPC metadata of callers, then in
TokenRequest. Spans are made from times that are noted once a request, when a part of it is over:
tokens cost nothing. They leave in the background; what a collector does not take is counted and
dropped. Attributes are OpenTelemetry's for generative AI where it has a word, else `paceline.*`.
They hold ids, counts and times; never a prompt, a text, or a tenant's name.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from urllib.parse import urlsplit

from paceline.core.errors import ConfigError

# names of spans; a gateway's is "OPERATION MODEL"
PREPARE, ROUTE, QUEUE, ATTEMPT = "prepare", "route", "queue", "attempt"
PREFILL, PULL, DECODE = "prefill", "pull", "decode"

# OpenTelemetry's attributes
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
NUM_CHOICES = "gen_ai.request.choice.count"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
TTFT = "gen_ai.response.time_to_first_chunk"  # seconds, from arrival at the gateway
ERROR_TYPE = "error.type"

# ours
REQUEST_ID = "paceline.request.id"
TENANT = "paceline.tenant"  # its digest
ATTEMPT_NUMBER = "paceline.attempt"
PREFILL_WORKER = "paceline.worker.prefill"
DECODE_WORKER = "paceline.worker.decode"
SOURCE_WORKER = "paceline.pull.source"
PULL_BUSY = "paceline.pull.busy_seconds"

Value = str | int | float | tuple[str, ...]
Attributes = Mapping[str, Value]
NO_ATTRIBUTES: Attributes = {}


class Span:
    """One that nobody records. `traceparent` is the context of what happens within it."""

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        """Empty: it is not recorded, and neither shall be what is below it."""
        return ""

    @property
    def trace_id(self) -> str:
        """32 hex digits, or empty."""
        return ""

    def end(self, attributes: Attributes = NO_ATTRIBUTES, error: str = "") -> None:
        """Now. `error`: the code of a failure."""


NO_SPAN = Span()


class Tracing:
    """Switched off; rpc/otel.py has the other one. Times are Unix time in nanoseconds."""

    is_on = False

    def start(
        self,
        name: str,
        parent: str,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        began_ns: int | None = None,
        is_entry: bool = False,
    ) -> Span:
        """A span that is to be ended. `parent`: a traceparent. `is_entry`: of a request as it comes
        into a service; without a right `parent` it begins a trace, where that is wanted."""
        return NO_SPAN

    def record(
        self,
        name: str,
        parent: str,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes = NO_ATTRIBUTES,
        error: str = "",
    ) -> None:
        """A span that is over already, unless `parent` is empty."""

    def close(self) -> None:
        """Sends what waits, for a moment. Blocks."""


OFF = Tracing()


def check_endpoint(field: str, endpoint: str) -> None:
    """Raises ConfigError for an endpoint that is none, or cannot be used here. Empty is fine."""
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname and parts.port)
    except ValueError:  # brackets or a port that are none
        fits = False
    ConfigError.check(field, endpoint, fits, "must be of the form http://host:4317 or https://…")
    has_sdk = find_spec("opentelemetry") and find_spec("opentelemetry.exporter.otlp.proto.grpc")
    reason = "needs opentelemetry, which is not installed: pip install 'paceline[otel]'"
    ConfigError.check(field, endpoint, bool(has_sdk), reason)
