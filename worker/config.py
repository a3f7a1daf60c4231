"""Configuration of a worker, whatever its role."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline.core.config import check_ports, check_positive, check_secret, setting
from paceline.core.errors import ConfigError
from paceline.core.kv_layout import ELEMENT_BYTES
from paceline.core.tls import PLAIN, TlsConfig
from paceline.core.tracing import check_endpoint
from paceline.kv_transfer import registry
from paceline.kv_transfer.tiers.config import load_tiers
from paceline.rpc.beats import MAX_BEAT_S
from paceline.worker.levels import LEVELS

DTYPES = ("auto", *ELEMENT_BYTES)
QUANTIZATIONS = ("auto", "int4", "int8")  # models/quantization.py; no torch in a front
_CHOICES = {"dtype": DTYPES, "quantization": QUANTIZATIONS, "level": tuple(LEVELS)}
_check = ConfigError.check


def check_device_name(device: str) -> None:
    """Its form; whether there is one is for a process with torch to find out."""
    known = re.fullmatch(r"cpu|cuda(:\d{1,3})?", device) is not None
    _check("device", device, known, "must be cpu, cuda or cuda:INDEX")


def check_transports(
    field: str, transports: tuple[str, ...], *, on_device: bool, tls: TlsConfig = PLAIN
) -> None:
    _check(field, transports, bool(transports), "must name one, or auto")
    for name in transports:
        if name not in (registry.AUTO, registry.MULTI):
            reason = registry.problem_of(name, on_device) or registry.why_confined(name, tls)
            _check(field, name, not reason, reason)


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """What computes, in which numbers, and how much memory KV has there."""

    device: str = setting("cpu", "Device of the rank: cpu, or cuda[:index].")
    dtype: str = setting("auto", "Number format of weights and KV: " + ", ".join(DTYPES) + ".")
    quantization: str = setting(
        "auto", "Rounds weights while they load: int8 or int4; auto: as the model's folder says."
    )
    level: str = setting(
        "O3",
        "What is prepared on a CUDA device: O0 nothing, O1 kernels, O2 graphs, O3 steps ahead.",
    )
    pool_mib: int = setting(512, "Size of the page pool in MiB.")
    num_threads: int = setting(0, "Compute threads of the rank; 0: one for each core it may use.")

    def __post_init__(self) -> None:
        check_device_name(self.device)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _check(name, value, value in choices, f"must be one of {', '.join(choices)}")
        check_positive(self, "pool_mib")
        _check("num_threads", self.num_threads, self.num_threads >= 0, "must not be negative")

    @property
    def pool_bytes(self) -> int:
        return self.pool_mib << 20


@dataclass(frozen=True, slots=True)
class StepSettings:
    """How much a step computes, and how long it may take."""

    max_batch_tokens: int = setting(1024, "Most tokens that one step computes.")
    max_running: int = setting(64, "Most sequences that one step computes.")
    output_window_tokens: int = setting(
        256, "Output tokens that an admitted request has room for in any case; 0: none."
    )
    step_time_ms: float = setting(
        100.0, "Time that a step with prefill in it aims at; twice that where nothing decodes."
    )
    itl_target_ms: float = setting(
        0.0, "Latency between tokens that prompts computed beside them leave to streams; 0: none."
    )

    def __post_init__(self) -> None:
        check_positive(self, "max_batch_tokens", "max_running", "step_time_ms")
        window = self.output_window_tokens
        _check("output_window_tokens", window, window >= 0, "must not be negative")
        target = self.itl_target_ms
        _check("itl_target_ms", target, target >= 0, "must not be negative")


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How KV moves between this worker and others."""

    transports: tuple[str, ...] = setting(
        ("auto",), "Transports to export and to read with, best first."
    )
    link_floor_mb_s: float = setting(
        50.0, "A link from another worker that is slower in its self-test is reported; 0: none."
    )
    max_pinned_share: float = setting(0.5, "Share of the pool that readers may pin.")

    def __post_init__(self) -> None:
        floor, share = self.link_floor_mb_s, self.max_pinned_share
        _check("link_floor_mb_s", floor, floor >= 0, "must not be negative")
        _check("max_pinned_share", share, 0 < share <= 1, "must lie in (0, 1]")


@dataclass(frozen=True, slots=True)
class Timers:
    """After how long somebody is missed."""

    silence_s: float = setting(6.0, "A router or reader not heard of for so long is gone.")
    beat_s: float = setting(1.0, "Time between beats on streams, leases and in Redis.")
    stall_s: float = setting(4.0, "A rank without an answer for so long makes us unready.")

    def __post_init__(self) -> None:
        check_positive(self, "silence_s", "beat_s", "stall_s")
        _check("beat_s", self.beat_s, self.beat_s < self.silence_s / 2, "must be < silence_s / 2")
        _check("beat_s", self.beat_s, self.beat_s <= MAX_BEAT_S, f"at most {MAX_BEAT_S:g} s")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker: one front process and one rank process with its page pool."""

    env_prefix: ClassVar[str] = "PACELINE_WORKER_"
    pull_threads: ClassVar[int] = 4  # that copy KV from other workers
    pulls_per_source: ClassVar[int] = 2  # at once
    max_slots: ClassVar[int] = 2048  # requests held at once, whatever their state

    worker_id: str = setting("", "Stable name of this worker; empty: role and a random part.")
    host: str = setting("127.0.0.1", "Address that gRPC and the probes listen on.")
    port: int = setting(0, "gRPC port of WorkerService and KvTransferService; 0: a free one.")
    probe_port: int = setting(0, "HTTP port of /livez, /readyz and /metrics; 0: a free one.")
    advertise_host: str = setting("", "Host that routers and peers connect to; empty: host.")
    place: str = setting("", "Where it runs, zone/node: decode pulls from near; empty: not said.")
    model: str = setting("", "Directory of the model: config.json and safetensors.")
    model_name: str = setting("", "Name that requests use; empty: the directory's name.")
    redis_url: str = setting("", "Where to register, redis://host:port; empty: nowhere.")
    secret: str = setting("", "The deployment's secret, which signs tickets.", secret=True)
    tiers: Path = setting(
        Path(), "YAML file that lists the tiers below the pool, the nearest first."
    )
    run_dir: str = setting("", "Parent of the private socket folder; empty: the system's.")
    drain_timeout_s: float = setting(30.0, "How long a drain waits for running requests.")
    otlp_endpoint: str = setting(
        "", "Collector of traces that speaks OTLP over gRPC, http://host:4317; empty: none."
    )
    compute: ComputeSettings = ComputeSettings()
    steps: StepSettings = StepSettings()
    links: LinkSettings = LinkSettings()
    timers: Timers = Timers()
    tls: TlsConfig = PLAIN

    def __post_init__(self) -> None:
        check_secret(self.secret, self.env_prefix)
        _check("model", self.model, os.path.isdir(self.model), "must be a folder with a model")
        check_ports(self, "port", "probe_port")
        on_device = self.compute.device != "cpu"
        check_transports("transports", self.links.transports, on_device=on_device, tls=self.tls)
        has_pool = not on_device or self.tiers == Path()
        _check("tiers", str(self.tiers), has_pool, "a pool on a device has no tiers yet")
        load_tiers(self.tiers)
        check_endpoint("otlp_endpoint", self.otlp_endpoint)
        drain = self.drain_timeout_s
        _check("drain_timeout_s", drain, drain >= 0, "must not be negative")

    @property
    def served_name(self) -> str:
        return self.model_name or os.path.basename(os.path.abspath(self.model))
