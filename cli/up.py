"""`paceline up`: a whole deployment on this machine, kept up until Ctrl-C."""

import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar

from paceline.cli import preflight
from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.cli.display import Display, say
from paceline.cli.foreground import own_foreground
from paceline.cli.ports import check_free, listen_error
from paceline.cli.roles import Settings
from paceline.cli.status_page import LOOPBACK, StatusPage
from paceline.core.config import check_ports, check_secret, setting
from paceline.core.errors import Cancelled, ConfigError
from paceline.core.tracing import check_endpoint
from paceline.gateway.usage import MAX_PROCESSES
from paceline.kv_transfer import registry

MAX_WORKERS = 64
ONE_TERM_S = 1.0  # a SIGTERM to the process group comes again when `make up` passes its own on
MAX_ROUTERS = 8
MAX_RUN_DIR_BYTES = 107 - len("/paceline-12345678/paceline-12345678/command")  # sun_path


@dataclass(frozen=True, slots=True)
class UpConfig:
    """Start redis, router, gateway and workers on this machine; drain them at Ctrl-C."""

    env_prefix: ClassVar[str] = "PACELINE_UP_"

    model: Path = setting(Path(), "Folder of the model: config.json, safetensors, tokenizer.")
    prefill: int = setting(1, "Number of prefill workers.")
    decode: int = setting(1, "Number of decode workers.")
    routers: int = setting(
        1, "Number of routers; with two, requests outlive the death of one of them."
    )
    gateways: int = setting(1, "Processes of the gateway behind its two ports.")
    transport: str = setting(
        "auto", "How KV travels between workers: auto, or names of docs/transports.md: shm, tcp, …"
    )
    host: str = setting("127.0.0.1", "Address that the gateway listens on; the rest: loopback.")
    port: int = setting(8000, "HTTP port of the gateway; 0: a free one.")
    grpc_port: int = setting(
        0, "gRPC port of the gateway; 0: the one after --port, or a free one if that is taken."
    )
    ui_port: int = setting(0, "Port of the status page /ui, on loopback; 0: a free one.")
    redis_url: str = setting("", "A Redis to use, redis://host:port; empty: an embedded one.")
    device: str = setting("", "Device of the workers, cpu or cuda; empty: their own setting.")
    quantization: str = setting("", "Of the workers, int8 or int4; empty: their own setting.")
    num_threads: int = setting(0, "Compute threads of each worker; 0: their own setting.")
    pool_mib: int = setting(0, "Page pool of each worker in MiB; 0: their own setting.")
    otlp_endpoint: str = setting(
        "", "Collector of traces for all services, http://host:4317; empty: their own setting."
    )
    secret: str = setting("", "Secret of the deployment; empty: one is drawn.", secret=True)
    run_dir: str = setting("", "Parent of the private folder for logs; empty: the system's.")
    ready_timeout_s: float = setting(180.0, "How long everything may take to become ready.")

    def __post_init__(self) -> None:
        check_model(self.model)
        check_transport(self.transport)
        check_endpoint("otlp_endpoint", self.otlp_endpoint)
        if self.secret:
            check_secret(self.secret, self.env_prefix)
        for name in ("prefill", "decode"):
            lowest = 1 if name == "decode" else 0
            if not lowest <= getattr(self, name) <= MAX_WORKERS:
                reason = f"must lie between {lowest} and {MAX_WORKERS}"
                raise ConfigError(name, getattr(self, name), reason)
        reason = f"must lie between 1 and {MAX_ROUTERS}"
        ConfigError.check("routers", self.routers, 1 <= self.routers <= MAX_ROUTERS, reason)
        reason = f"must lie between 1 and {MAX_PROCESSES}"
        ConfigError.check("gateways", self.gateways, 1 <= self.gateways <= MAX_PROCESSES, reason)
        check_ports(self, "port", "grpc_port", "ui_port")
        if self.port and self.port == self.grpc_port:
            raise ConfigError("grpc_port", self.grpc_port, "must differ from port")
        if not self.ready_timeout_s > 0:
            raise ConfigError("ready_timeout_s", self.ready_timeout_s, "must be positive")
        if self.run_dir and not os.path.isdir(self.run_dir):
            raise ConfigError("run_dir", self.run_dir, "must be a folder")
        room = MAX_RUN_DIR_BYTES - len(os.fsencode(os.path.abspath(self.run_dir)))
        reason = f"its path is {-room} bytes too long for the sockets that lie below it"
        ConfigError.check("run_dir", self.run_dir, not self.run_dir or room >= 0, reason)

    def next_port(self) -> int:
        """The one after `port` if it can be had; 0: any."""
        following = self.port + 1 if 0 < self.port < 65535 else 0
        return 0 if following and listen_error(self.host, following) else following

    def spec(self) -> ClusterSpec:
        worker: dict[str, object] = {"transports": self.transport}
        for name in ("device", "quantization", "num_threads", "pool_mib"):
            if value := getattr(self, name):
                worker[name] = value
        traces = {"otlp_endpoint": self.otlp_endpoint} if self.otlp_endpoint else {}
        worker |= traces
        settings: dict[str, Settings] = {"prefill": worker, "decode": worker}
        settings |= {"router": traces, "gateway": traces}
        return ClusterSpec(
            model=self.model.absolute(),
            prefill=self.prefill,
            decode=self.decode,
            routers=self.routers,
            gateways=self.gateways,
            host=self.host,
            port=self.port,
            grpc_port=self.grpc_port or self.next_port(),
            redis_url=self.redis_url,
            secret=self.secret,
            settings=settings,
            run_parent=Path(self.run_dir) if self.run_dir else None,
            ready_timeout_s=self.ready_timeout_s,
        )


def check_model(model: Path) -> None:
    if model == Path():
        reason = "name a model's folder; `paceline demo-model` makes one and prints it"
        raise ConfigError("model", "", reason)
    if not model.is_dir():
        raise ConfigError("model", str(model), "there is no such folder; nothing is downloaded")
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            raise ConfigError("model", str(model), f"there is no {name} in this folder")


def check_transport(transport: str) -> None:
    choices = (registry.AUTO, registry.MULTI)
    known = (*choices, *registry.between_processes())
    for name in transport.split(","):
        ConfigError.check("transport", name, name in known, f"must be one of {', '.join(known)}")
        problem = "" if name in choices else registry.problem_of(name)
        ConfigError.check("transport", name, not problem, problem)


def run(config: UpConfig) -> int:
    with own_foreground(os.environ):
        return keep_up(config)


def keep_up(config: UpConfig) -> int:
    for name in ("port", "grpc_port"):
        if port := getattr(config, name):
            check_free(name, config.host, port)
    if config.ui_port:
        check_free("ui_port", LOOPBACK, config.ui_port)
    began = time.monotonic()
    display = Display()
    spec = config.spec()
    preflight.check(spec, os.environ, frozenset(f.name for f in dataclasses.fields(config)))
    if config.port and not spec.grpc_port:
        say(f"paceline: port {config.port + 1} is taken; gRPC of the gateway gets a free one")
    cluster = Cluster(spec, display)
    asked_to_stop = handle_signals(cluster, display)
    try:
        with display:
            cluster.start()
    except Cancelled as cancelled:
        say(f"paceline: {cancelled.message}")
        return 0
    page = StatusPage(
        config.ui_port, lambda: [str(url) for url in cluster.urls.values()], cluster.operator_urls
    )
    page.start()
    print(welcome(cluster, config, page.url, time.monotonic() - began), flush=True)
    asked_to_stop.wait()
    page.stop()
    clean = cluster.stop()
    if cluster.run_dir.exists():
        what = "some were started again" if clean else "not all ended cleanly"
        say(f"paceline: {what}; logs: {cluster.run_dir}")
    return 0 if clean else 1


def handle_signals(cluster: Cluster, display: Display) -> threading.Event:
    """SIGINT, SIGTERM, a closed terminal: the event is set, a start ends. The second one kills.

    A handler may interrupt anything, itself too, while it holds a lock: it only queues."""
    asked = threading.Event()
    signals: SimpleQueue[int] = SimpleQueue()  # whose put may be interrupted by another put

    def react() -> None:
        signals.get()
        first_at = time.monotonic()
        if not display.is_live:
            say("\npaceline: draining; once more kills")
        asked.set()
        cluster.cancel()
        while signals.get() == signal.SIGTERM and time.monotonic() - first_at < ONE_TERM_S:
            pass
        cluster.kill_all()

    threading.Thread(target=react, name="signals", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signals.put(number))
    return asked


def welcome(cluster: Cluster, config: UpConfig, page_url: str, took_s: float) -> str:
    lines = [f"\nPaceline is ready after {took_s:.1f} s: {cluster.base_url}\n"]
    lines += [curl(cluster.base_url, config.model), "", f"  status   {page_url}"]
    for name, url in cluster.urls.items():
        lines.append(f"  metrics  {url}/metrics  ({name})")
    lines += [f"  requests {url}/debug/requests" for url in cluster.operator_urls]
    lines += [f"  gRPC     {cluster.grpc_endpoint}", f"  logs     {cluster.run_dir}/*.log"]
    us = own_command()
    lines += [f"  live     {us} top --urls {','.join(map(str, cluster.urls.values()))}"]
    secret = f"PACELINE_EXPLAIN_SECRET=$(cat {cluster.folder.secret_path})"
    lines += [f"  why      {secret} {us} explain --router {cluster.router_endpoints}"]
    secret = secret.replace("EXPLAIN", "ROLE")
    lines += [f"  roles    {secret} {us} role --router {cluster.router_endpoints}", ""]
    return "\n".join([*lines, "Ctrl-C drains and stops everything."])


def own_command() -> str:
    """How a terminal in this folder calls us, also where .venv/bin is not on its PATH."""
    found = shutil.which("paceline")
    ours = Path(sys.executable).with_name("paceline")
    if (found and Path(found).samefile(ours)) or not ours.exists():
        return "paceline"
    return os.path.relpath(ours) if ours.is_relative_to(Path.cwd()) else str(ours)


def curl(base_url: str, model: Path) -> str:
    """A first request, ready to paste."""
    question = "What is the capital of France?"
    body: dict[str, object] = {"model": model.absolute().name, "max_tokens": 64, "temperature": 0}
    if has_chat_template(model):
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": question}]
    else:
        path = "/v1/completions"
        body["prompt"] = "The capital of France is"
    header = "-H 'Content-Type: application/json'"
    return f"  curl {base_url}{path} {header} \\\n    -d '{json.dumps(body)}'"


def has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").is_file():
        return True
    try:
        settings = json.loads((model / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))
