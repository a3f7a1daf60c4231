"""The tracing of a process, as its settings say."""

from prometheus_client import CollectorRegistry

from paceline.core.tracing import OFF, Tracing


def make_tracing(
    endpoint: str,
    service: str,
    registry: CollectorRegistry,
    *,
    instance: str = "",
    new_traces: float = 0.0,
) -> Tracing:
    """Of one process. `new_traces`: the share of requests without a parent that get a trace."""
    if not endpoint:
        return OFF
    from paceline.rpc.otel import OtelTracing

    return OtelTracing(endpoint, service, registry, instance=instance, new_traces=new_traces)
