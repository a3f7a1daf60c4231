"""Configuration of the router."""

from dataclasses import dataclass
from typing import ClassVar

from paceline.core.config import check_ports, check_secret, setting
from paceline.core.errors import ConfigError
from paceline.core.tls import PLAIN, TlsConfig
from paceline.core.tracing import check_endpoint
from paceline.rpc.beats import MAX_BEAT_S

STALE_BEATS = 2
_check = ConfigError.check


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Admits requests, picks workers for them, and keeps the tokens that they emitted."""

    env_prefix: ClassVar[str] = "PACELINE_ROUTER_"

    host: str = setting("127.0.0.1", "Address that gRPC and the probes listen on.")
    port: int = setting(9100, "gRPC port of RouterService; 0: a free one.")
    probe_port: int = setting(9101, "HTTP port of /livez, /readyz and /metrics; 0: a free one.")
    redis_url: str = setting("redis://127.0.0.1:6379", "Where workers register.")
    secret: str = setting("", "The deployment's secret, which signs tickets.", secret=True)
    queue_limit: int = setting(1024, "Most requests that wait for a worker; more are refused.")
    queue_tokens: int = setting(8 << 20, "Most prompt tokens that wait, six bytes each.")
    max_slots_per_worker: int = setting(256, "Most requests sent to one worker at a time.")
    split_min_tokens: int = setting(
        32, "Prompts with no more uncached tokens than this are prefilled on the decode worker."
    )
    max_attempts: int = setting(5, "How often a request is planned before its error is final.")
    request_limit_s: float = setting(3600.0, "Time limit of requests that bring none.")
    worker_wait_s: float = setting(
        30.0,
        "How long after the last worker was lost requests wait for one; a restart takes 3 to 11 s.",
    )
    beat_s: float = setting(1.0, "Time between beats to workers and gateways; theirs is 1 s, too.")
    dead_after_s: float = setting(3.0, "A worker without any frame for so long is gone.")
    stall_after_s: float = setting(
        10.0,
        "A worker with work and no sign of its step loop for so long is stuck; sooner if its"
        " steps are short.",
    )
    reserve_timeout_s: float = setting(2.0, "How long a decode worker may take to reserve.")
    handoff_timeout_s: float = setting(5.0, "How long decode may be silent after the first token.")
    ticket_margin_s: float = setting(10.0, "Life of a ticket beyond its request's deadline.")
    index_mib: int = setting(256, "Most memory of the index of cached blocks, in MiB; 2 or more.")
    redis_timeout_s: float = setting(1.0, "Longest wait for one answer of Redis.")
    drain_timeout_s: float = setting(30.0, "How long a drain waits for running requests.")
    otlp_endpoint: str = setting(
        "", "Collector of traces that speaks OTLP over gRPC, http://host:4317; empty: none."
    )
    tls: TlsConfig = PLAIN

    def __post_init__(self) -> None:
        check_secret(self.secret, self.env_prefix)
        known = self.redis_url.startswith(("redis://", "rediss://", "unix://"))
        _check("redis_url", self.redis_url, known, "must start with redis://, rediss:// or unix://")
        check_ports(self, "port", "probe_port")
        for name in _COUNTS:
            _check(name, getattr(self, name), getattr(self, name) >= 1, "must be at least 1")
        _check("index_mib", self.index_mib, self.index_mib >= 2, "must be at least 2")
        for name in _POSITIVE_TIMES:
            _check(name, getattr(self, name), getattr(self, name) > 0, "must be positive")
        _check("beat_s", self.beat_s, self.beat_s <= MAX_BEAT_S, f"at most {MAX_BEAT_S:g} s")
        outlasts = self.dead_after_s >= self.stale_after_s
        reason = f"must last {STALE_BEATS} beats of {self.beat_s:g} s"
        _check("dead_after_s", self.dead_after_s, outlasts, reason)
        tokens = self.split_min_tokens
        _check("split_min_tokens", tokens, tokens >= 0, "must not be negative")
        check_endpoint("otlp_endpoint", self.otlp_endpoint)
        drain = self.drain_timeout_s
        _check("drain_timeout_s", drain, drain >= 0, "must not be negative")

    @property
    def stale_after_s(self) -> float:
        """A worker that was silent for so long gets no new work."""
        return STALE_BEATS * self.beat_s


_COUNTS = ("queue_limit", "queue_tokens", "max_slots_per_worker", "max_attempts")
_POSITIVE_TIMES = (
    "beat_s",
    "request_limit_s",
    "worker_wait_s",
    "dead_after_s",
    "stall_after_s",
    "reserve_timeout_s",
    "handoff_timeout_s",
    "ticket_margin_s",
    "redis_timeout_s",
)
