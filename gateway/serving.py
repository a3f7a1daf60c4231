"""What HTTP and gRPC share in one process: the text model, the router, admission, readiness."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from paceline.core.errors import InvalidRequest, ModelNotFound, Overloaded, Unavailable, shown
from paceline.core.tls_metrics import CertificateMetrics
from paceline.gateway.authentication import Authentication
from paceline.gateway.config import GatewayConfig
from paceline.gateway.deadline import Deadline
from paceline.gateway.embedding_run import EmbeddingRun
from paceline.gateway.generation import Generation
from paceline.gateway.http_limits import http_limits
from paceline.gateway.mailbox import Mailbox
from paceline.gateway.metrics import GatewayMetrics, now_s
from paceline.gateway.prompts import Prompts
from paceline.gateway.request_log import Origin, RequestRecord
from paceline.gateway.router import Router
from paceline.gateway.router_client import RouterClient
from paceline.gateway.runs import Runs
from paceline.gateway.statistics import RequestTimes
from paceline.gateway.tenants import Tenant
from paceline.gateway.tokenizer import TextModel
from paceline.gateway.usage import Usages
from paceline.rpc.tracing import make_tracing
from paceline.v1.control_pb2 import ModelInfo

logger = structlog.stdlib.get_logger("paceline.gateway")
NO_DECODE_WORKER = "no decode worker is connected"
_RETRY_AFTER_S = 1.0


class Serving:
    """Created once a process. Raises ConfigError if the model directory cannot be served.

    `router`: None makes a client of those that the configuration names. `usages`: what tenants
    used, where other processes of this gateway see it; None: only here."""

    def __init__(
        self, config: GatewayConfig, router: Router | None = None, usages: Usages | None = None
    ) -> None:
        self.config = config
        self.http_limits = http_limits(config.clients)
        self.text = TextModel(config)
        self.prompts = Prompts(self.text)
        self.metrics = GatewayMetrics()
        self.metrics.registry.register(CertificateMetrics(config.tls))
        reporting, registry = config.reporting, self.metrics.registry
        self.tracing = make_tracing(
            reporting.otlp_endpoint, "gateway", registry, new_traces=reporting.trace_ratio
        )
        self.authentication = Authentication(
            config.api_keys, config.secret, self.metrics.key_file_valid, usages
        )
        self.router: Router = router or RouterClient(config, self._changed, self.metrics.moved)
        self.is_draining = False
        self.on_change: Callable[[], None] = lambda: None
        self.num_running = 0
        self._reported: list[str] | None = None
        self._runs = Runs(self.tracing, log_requests=reporting.log_requests)

    def reasons(self) -> list[str]:
        """Why this gateway is not ready; empty when it is."""
        if self.is_draining:
            return ["draining"]
        if not self.router.is_attached:
            return ["no router is reachable"]
        if self.models():
            return []
        if self.known_models():
            return [NO_DECODE_WORKER]
        foreign = ", ".join(model.name for model in self._wanted())
        if foreign:
            return [f"tokenizer or chat template differs from that of the workers of {foreign}"]
        return ["the router knows no model yet"]

    def start_draining(self) -> None:
        """New requests are refused from now on, and readiness says so."""
        self.is_draining = True
        self._changed()

    def end_running(self) -> None:
        """The time to drain is over: what still runs ends with an error that says so."""
        error = Unavailable("the gateway is shutting down", retry_after_s=_RETRY_AFTER_S)
        self._runs.fail_all(error)

    def models(self) -> list[ModelInfo]:
        """Models that are served now."""
        return [model for model in self.known_models() if not model.unavailable]

    def known_models(self) -> list[ModelInfo]:
        """Models whose tokenizer and template are this gateway's, also while requests for them
        wait for a decode worker."""
        return [model for model in self._wanted() if self._is_ours(model)]

    def model(self, name: str) -> ModelInfo:
        """Raises ModelNotFound, or Unavailable while it is not known which models there are."""
        for model in self._wanted():
            if model.name == name:
                if self._is_ours(model):
                    return model
                raise Unavailable(
                    "the model's workers have another tokenizer or chat template than the gateway",
                    retry_after_s=_RETRY_AFTER_S,
                )
        if not self.router.models:
            raise Unavailable("no model is being served yet", retry_after_s=_RETRY_AFTER_S)
        raise ModelNotFound(f"The model {shown(name)} does not exist.", field="model")

    def model_or_only(self, name: str | None) -> ModelInfo:
        """No name means the only model. Raises like `model`, and InvalidRequest for several."""
        models = self.known_models()
        if not name and len(models) == 1:
            return models[0]
        if not name and models:
            raise InvalidRequest("model", name, "name one: several are served")
        return self.model(name or "")

    @contextmanager
    def admitted(self, tenant: Tenant) -> Iterator[None]:
        """Counts a request in. Raises Overloaded at the bound, RateLimited at the tenant's own, and
        Unavailable while draining."""
        if self.is_draining:
            raise Unavailable("the gateway is shutting down", retry_after_s=_RETRY_AFTER_S)
        if self.num_running >= self.config.clients.max_concurrent_requests:
            message = f"{self.num_running} requests are being served already"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S)
        self.num_running += 1
        self.metrics.running.set(self.num_running)
        try:
            with tenant.meter.request(now_s()):
                yield
        finally:
            self.num_running -= 1
            self.metrics.running.set(self.num_running)

    @contextmanager
    def generation(
        self,
        model: ModelInfo,
        tenant: Tenant,
        on_overflow: Callable[[], object],
        deadline: Deadline,
        origin: Origin,
        *,
        has_statistics: bool = False,
    ) -> Iterator[Generation]:
        """Closed when the block is left, and seen by operators; see Runs."""
        generation = Generation(
            self.router,
            self.text,
            self.metrics.for_model(model.name),
            tenant.meter,
            self._mailbox(on_overflow),
            deadline,
            self._record(model, tenant, deadline, origin),
            has_statistics=has_statistics,
        )
        with self._runs.during(generation, deadline):
            yield generation

    @contextmanager
    def embedding(
        self, model: ModelInfo, tenant: Tenant, deadline: Deadline, origin: Origin
    ) -> Iterator[EmbeddingRun]:
        """The same. Nothing is written to a client meanwhile, so there is nobody to free."""
        run = EmbeddingRun(
            self.router,
            self.metrics.for_model(model.name),
            tenant.meter,
            self._mailbox(lambda: None),
            deadline,
            self._record(model, tenant, deadline, origin),
        )
        with self._runs.during(run, deadline):
            yield run

    def requests_page(self) -> bytes:
        """/debug/requests."""
        return self._runs.page()

    def _record(
        self, model: ModelInfo, tenant: Tenant, deadline: Deadline, origin: Origin
    ) -> RequestRecord:
        times = RequestTimes(deadline.started_s)
        record = RequestRecord(origin, model.name, tenant.digest, times)
        record.begin_span(self.tracing, now_s())
        return record

    def _mailbox(self, on_overflow: Callable[[], object]) -> Mailbox:
        clients = self.config.clients
        limits = clients.max_pending_emissions, clients.max_pending_bytes
        return Mailbox(*limits, on_overflow)

    def _wanted(self) -> list[ModelInfo]:
        wanted = self.config.model_name
        return [m for m in self.router.models.values() if not wanted or m.name == wanted]

    def _is_ours(self, model: ModelInfo) -> bool:
        return model.serving_digest == self.text.digest

    def _changed(self) -> None:
        reasons = self.reasons()
        if reasons != self._reported:
            self._reported = reasons
            logger.info("readiness", ready=not reasons, reasons=reasons)
        self.on_change()
