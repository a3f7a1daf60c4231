"""What a gateway can be told."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline.core.config import check_ports, check_positive, check_secret, setting
from paceline.core.errors import ConfigError
from paceline.core.tls import PLAIN, TlsConfig
from paceline.core.tracing import check_endpoint
from paceline.gateway.usage import MAX_PROCESSES
from paceline.rpc.beats import MAX_BEAT_S


def _check_endpoint(field: str, endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536
    if not host or not is_port:
        raise ConfigError(field, endpoint, "must be host:port")


@dataclass(frozen=True, slots=True)
class RouterLinks:
    """Where routers are, and when one is left."""

    router: tuple[str, ...] = setting(
        ("127.0.0.1:9100",),
        "Routers (host:port, comma-separated) in the order to try them; a name is looked up"
        " again for each search, and all its addresses are tried.",
    )
    spread_routers: bool = setting(
        False,
        "Try the routers' names in an order by lot, each time: then the processes and replicas of"
        " gateways share several routers.",
    )
    router_silence_s: float = setting(
        3.0, "A router not heard of for so long is left for the next; it beats every second."
    )
    router_wait_s: float = setting(
        30.0, "How long after the last router was lost requests wait for one, new ones too."
    )

    def __post_init__(self) -> None:
        ConfigError.check("router", self.router, bool(self.router), "name one at least: host:port")
        for endpoint in self.router:
            _check_endpoint("router", endpoint)
        check_positive(self, "router_silence_s", "router_wait_s")
        outlasts = self.router_silence_s > MAX_BEAT_S
        reason = f"must be longer than the {MAX_BEAT_S:g} s between beats of a router"
        ConfigError.check("router_silence_s", self.router_silence_s, outlasts, reason)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """How many clients are served, what they may send, and how slow they may be."""

    max_body_bytes: int = setting(1 << 20, "Largest request body; a larger one gets 413.")
    max_concurrent_requests: int = setting(
        1024, "Requests that a process serves at once; more get 429."
    )
    max_pending_emissions: int = setting(
        2048, "Steps that a slow client may lag behind before its request is cancelled."
    )
    max_pending_bytes: int = setting(
        8 << 20, "Bytes of emissions that wait for one client before its request is cancelled."
    )
    read_timeout_s: float = setting(
        30.0,
        "Longest time that head or body of a request, or its gRPC message, may take, and that a"
        " client may take none of its answer.",
    )
    heartbeat_s: float = setting(
        15.0, "A stream without new tokens for so long gets a comment, once it has begun."
    )
    keep_alive_s: float = setting(75.0, "How long an idle connection stays open.")

    def __post_init__(self) -> None:
        check_positive(self, *self.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may ask for, and how long it may take."""

    max_rendered_chars: int = setting(4 << 20, "Longest text that a chat template may produce.")
    render_timeout_s: float = setting(2.0, "Longest time that a chat template may take.")
    max_stop_strings: int = setting(4, "Most stop strings of a request.")
    max_prompts: int = setting(32, "Most prompts of one completions request.")
    max_embedding_inputs: int = setting(2048, "Most inputs of one request for embeddings.")
    max_embedding_numbers: int = setting(
        3 << 20, "Most numbers in an answer with embeddings: inputs times dimensions."
    )
    max_prompt_logprobs: int = setting(
        1 << 18,
        "Most log probabilities of prompts in an answer: prompt tokens times (prompt_logprobs + 1),"
        " in a completion times n.",
    )
    max_answer_logprobs: int = setting(
        1 << 19,
        "Most log probabilities of tokens in an answer that is not streamed: max_tokens times n"
        " times (top_logprobs + 1).",
    )
    request_timeout_s: float = setting(600.0, "Longest time that a request may take.")

    def __post_init__(self) -> None:
        check_positive(self, *self.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Reporting:
    """What is told of requests, in traces and in the log."""

    otlp_endpoint: str = setting(
        "", "Collector of traces that speaks OTLP over gRPC, http://host:4317; empty: none."
    )
    trace_ratio: float = setting(
        1.0, "Share of the requests that are traced, of those whose callers send no traceparent."
    )
    log_requests: bool = setting(
        False, "A log line for each request that has ended: ids, counts and times, no text."
    )

    def __post_init__(self) -> None:
        check_endpoint("otlp_endpoint", self.otlp_endpoint)
        ratio = self.trace_ratio
        ConfigError.check("trace_ratio", ratio, 0 <= ratio <= 1, "must lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """OpenAI-compatible front door of a deployment."""

    env_prefix: ClassVar[str] = "PACELINE_GATEWAY_"

    model: Path = setting(Path(), "Model directory: tokenizer and chat template are read from it.")
    model_name: str = setting("", "Serve this model only; empty: all with the same tokenizer.")
    host: str = setting("127.0.0.1", "Address that HTTP and gRPC listen on.")
    port: int = setting(8000, "HTTP port; 0 picks a free one.")
    grpc_port: int = setting(8001, "Port of the gRPC GenerateService; 0 picks a free one.")
    processes: int = setting(
        1, "Processes behind the two ports: as many as cores that the gateway may use."
    )
    probe_port: int = setting(
        8002,
        "With several processes, where the first one shows its /metrics, /livez and /readyz, the"
        " others at the ports after it; 0 picks free ones.",
    )
    stall_s: float = setting(
        30.0, "One of several processes that stands still for so long is ended and started again."
    )
    operator_address: str = setting(
        "",
        "Where operators find /debug/requests and /metrics, as host:port; port 0 picks a free one."
        " Of several processes the others are at the ports after it."
        " No key is asked for, so nobody else may reach it; empty: nowhere.",
    )
    secret: str = setting(
        "", "The deployment's secret: separates tenants' KV, opens the routers.", secret=True
    )
    api_keys: Path = setting(
        Path(), "File of tenants and digests of their API keys; none: nobody is asked for a key."
    )
    drain_timeout_s: float = setting(30.0, "How long running streams may take at shutdown.")
    links: RouterLinks = RouterLinks()
    clients: ClientLimits = ClientLimits()
    limits: RequestLimits = RequestLimits()
    reporting: Reporting = Reporting()
    tls: TlsConfig = PLAIN

    @property
    def shares_ports(self) -> bool:
        """Whether other processes listen on them, too."""
        return self.processes > 1

    def __post_init__(self) -> None:
        if self.model == Path():
            raise ConfigError("model", "", "name the folder of a model: its tokenizer is needed")
        if not (self.model / "tokenizer.json").is_file():
            reason = "must be a model directory with a tokenizer.json"
            raise ConfigError("model", str(self.model), reason)
        check_secret(self.secret, self.env_prefix)
        check_ports(self, "port", "grpc_port", "probe_port")
        check_positive(self, "processes", "drain_timeout_s")
        reason = f"must be at most {MAX_PROCESSES}"
        ConfigError.check("processes", self.processes, self.processes <= MAX_PROCESSES, reason)
        reason = "must be longer than 2 s: each process beats every second"
        ConfigError.check("stall_s", self.stall_s, self.stall_s > 2, reason)
        if self.operator_address:
            _check_endpoint("operator_address", self.operator_address)
