"""Metrics as text, in the format that the reader understands."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

_OPENMETRICS = "application/openmetrics-text"


def exposition(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """Content type and text: OpenMetrics, which has exemplars, where the Accept header names it;
    else Prometheus' own format. 10 ms with many labels."""
    kinds = (kind.split(";")[0].strip().lower() for kind in accept.split(","))
    if _OPENMETRICS in kinds:
        as_named = openmetrics.ALLOWUTF8  # the default takes vllm: for a name to be escaped
        text: bytes = openmetrics.generate_latest(registry, as_named)  # type: ignore[no-untyped-call]
        return openmetrics.CONTENT_TYPE_LATEST, text
    return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry)
