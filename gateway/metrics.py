"""What a gateway counts. Names that dashboards already read are vLLM's."""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from paceline import __version__
from paceline.core import metrics as names
from paceline.core.errors import ErrorCode
from paceline.core.finish import FinishReason
from paceline.core.sampling import SamplingParams
from paceline.gateway.statistics import RequestTimes

ENGINE = "0"  # seen from here, all workers are one engine
MAX_MODELS = 256  # whose series are kept apart


class GatewayMetrics:
    """One registry a gateway, so that a process can hold several."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        names.SERVICE_INFO.gauge(registry).labels("gateway", __version__).set(1)
        self._ttft = names.TTFT.histogram(registry)
        self._itl = names.INTER_TOKEN_LATENCY.histogram(registry)
        self._time_per_token = names.TIME_PER_OUTPUT_TOKEN.histogram(registry)
        self._e2e = names.E2E_LATENCY.histogram(registry)
        self._queue = names.REQUEST_QUEUE_SECONDS.histogram(registry)
        self._prefill = names.REQUEST_PREFILL_SECONDS.histogram(registry)
        self._decode = names.REQUEST_DECODE_SECONDS.histogram(registry)
        self._inference = names.REQUEST_INFERENCE_SECONDS.histogram(registry)
        self._stages = names.STAGE_SECONDS.histogram(registry)
        self._request_prompt = names.REQUEST_PROMPT_TOKENS.histogram(registry)
        self._request_generation = names.REQUEST_GENERATION_TOKENS.histogram(registry)
        self._request_computed = names.REQUEST_COMPUTED_TOKENS.histogram(registry)
        self._request_longest = names.REQUEST_MAX_GENERATION_TOKENS.histogram(registry)
        self._n = names.REQUEST_PARAMS_N.histogram(registry)
        self._max_tokens = names.REQUEST_PARAMS_MAX_TOKENS.histogram(registry)
        self._prompt_tokens = names.PROMPT_TOKENS.counter(registry)
        self._prompt_tokens_cached = names.PROMPT_TOKENS_CACHED.counter(registry)
        self._embeddings = names.EMBEDDINGS.counter(registry)
        self._generation_tokens = names.GENERATION_TOKENS.counter(registry)
        self._success = names.REQUEST_SUCCESS.counter(registry)
        self.errors = names.GATEWAY_ERRORS.counter(registry)
        for code in ErrorCode:  # an increase from nothing would not be seen
            self.errors.labels(code.value)
        self.running = names.GATEWAY_RUNNING.gauge(registry)
        self.key_file_valid = names.GATEWAY_KEY_FILE_VALID.gauge(registry)
        self.disconnects = names.GATEWAY_DISCONNECTS.counter(registry)
        self.moved = names.GATEWAY_MOVED.counter(registry)
        for reason in ("drained", "lost"):
            self.moved.labels(reason)
        self._models: dict[str, ModelMetrics] = {}

    def for_model(self, model_name: str) -> "ModelMetrics":
        """Of a model that workers serve. Beyond MAX_MODELS they share one name."""
        known = self._models.get(model_name)
        if known is None:
            name = model_name if len(self._models) < MAX_MODELS else "other"
            known = self._models.get(name) or ModelMetrics(self, name)
            self._models[name] = known
        return known


class ModelMetrics:
    """Children for one model, looked up once rather than with every request and token."""

    def __init__(self, metrics: GatewayMetrics, model_name: str) -> None:
        labels = model_name, ENGINE
        self.ttft = metrics._ttft.labels(*labels)
        self.inter_token = metrics._itl.labels(*labels)
        self.e2e = metrics._e2e.labels(*labels)
        self.prompt_tokens = metrics._prompt_tokens.labels(*labels)
        self.prompt_tokens_cached = metrics._prompt_tokens_cached.labels(*labels)
        self._embeddings = metrics._embeddings.labels(model_name)
        self.generation_tokens = metrics._generation_tokens.labels(*labels)
        self._time_per_token = metrics._time_per_token.labels(*labels)
        self._queue = metrics._queue.labels(*labels)
        self._prefill = metrics._prefill.labels(*labels)
        self._decode = metrics._decode.labels(*labels)
        self._inference = metrics._inference.labels(*labels)
        self._request_prompt = metrics._request_prompt.labels(*labels)
        self._request_generation = metrics._request_generation.labels(*labels)
        self._request_computed = metrics._request_computed.labels(*labels)
        self._request_longest = metrics._request_longest.labels(*labels)
        self._n = metrics._n.labels(*labels)
        self._max_tokens = metrics._max_tokens.labels(*labels)
        stages = ("prepare", "queue", "prefill", "pull", "second_token", "decode")
        self._stages = {name: metrics._stages.labels(model_name, name) for name in stages}
        self._success = {
            reason: metrics._success.labels(*labels, reason.value) for reason in FinishReason
        }

    def asked(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self._n.observe(params.n)
        self._max_tokens.observe(params.max_tokens)
        self._request_prompt.observe(num_prompt_tokens)

    def embedding_asked(self, num_tokens: int) -> None:
        self._request_prompt.observe(num_tokens)

    def embedding_made(self) -> None:
        self._embeddings.inc()
        self.choice_ended(FinishReason.STOP)

    def choice_ended(self, reason: FinishReason) -> None:
        self._success[reason].inc()

    def request_ended(self, times: RequestTimes, num_computed_tokens: int) -> None:
        """Of one that had a token or a vector: the tokens of its prompts that were not cached."""
        self._request_computed.observe(num_computed_tokens)
        for stage, seconds in times.stages().items():
            self._stages[stage].observe(seconds)
        self._queue.observe(times.queue_s)
        self._prefill.observe(times.prefill_s)
        self._inference.observe(times.prefill_s + times.decode_s)

    def generation_ended(self, times: RequestTimes, lengths: Sequence[int]) -> None:
        """Of one that had a token: those of its choices."""
        num_tokens, num_choices = sum(lengths), len(lengths)
        self._decode.observe(times.decode_s)
        self._request_longest.observe(max(lengths))
        self._request_generation.observe(num_tokens)
        if num_tokens > num_choices:
            self._time_per_token.observe(times.decode_s * num_choices / (num_tokens - num_choices))


def now_s() -> float:
    return time.perf_counter()
