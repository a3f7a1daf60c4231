"""What a gateway counts. Names that dashboards already read are vLLM's."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paceline.core import metrics as names
from paceline.core.finish import FinishReason

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """One registry a gateway, so that a process can hold several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ttft = self._histogram(
            names.TTFT, "Arrival of a request to its first token.", _TTFT_BUCKETS
        )
        self._itl = self._histogram(
            names.INTER_TOKEN_LATENCY, "Between two emissions of a choice.", _ITL_BUCKETS
        )
        self._e2e = self._histogram(
            names.E2E_LATENCY, "Arrival of a request to its last token.", _E2E_BUCKETS
        )
        self._prompt_tokens = self._counter(names.PROMPT_TOKENS, "Prompt tokens received.")
        self._generation_tokens = self._counter(names.GENERATION_TOKENS, "Tokens generated.")
        self._success = self._counter(
            names.REQUEST_SUCCESS, "Choices that ended, by reason.", "finished_reason"
        )
        self.errors = Counter(
            names.GATEWAY_ERRORS,
            "Requests refused or failed, by code.",
            ["code"],
            registry=self.registry,
        )
        self.running = Gauge(
            names.GATEWAY_RUNNING, "Requests that are being served.", registry=self.registry
        )
        self.key_file_valid = Gauge(
            names.GATEWAY_KEY_FILE_VALID,
            "1, or 0 while the file of API keys is wrong and an earlier state of it counts.",
            registry=self.registry,
        )
        self.disconnects = Counter(
            names.GATEWAY_DISCONNECTS, "Clients that left early.", registry=self.registry
        )

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def for_model(self, model_name: str) -> "ModelMetrics":
        return ModelMetrics(self, model_name)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, ["model_name"], buckets=buckets, registry=self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, ["model_name", *labels], registry=self.registry)


class ModelMetrics:
    """Children for one model, looked up once a request rather than once a token."""

    def __init__(self, metrics: GatewayMetrics, model_name: str) -> None:
        self.ttft = metrics._ttft.labels(model_name)
        self.inter_token = metrics._itl.labels(model_name)
        self.e2e = metrics._e2e.labels(model_name)
        self.prompt_tokens = metrics._prompt_tokens.labels(model_name)
        self.generation_tokens = metrics._generation_tokens.labels(model_name)
        self._success = metrics._success
        self._model_name = model_name

    def choice_ended(self, reason: FinishReason) -> None:
        self._success.labels(self._model_name, reason.value).inc()


def now_s() -> float:
    return time.perf_counter()
