"""A whole deployment as processes on this machine, for `paceline up`, tests and benchmarks.

    redis ◄── router ◄── gateway          names: redis, router, router-1 …, gateway, prefill-0 …
                └── prefill-i, decode-j   ports: loopback, free ones unless told otherwise

Life: start() waits until all are ready; then a keeper restarts what dies, with back-off; stop()
drains gateway → router → workers → redis. A gateway of several processes is one child; `urls`
names them gateway, gateway-1 …. Every process dies with this one.
"""

import os
import secrets
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Self

from paceline.cli.child import Child
from paceline.cli.keeper import Keeper
from paceline.cli.ports import free_port, free_ports
from paceline.cli.redis_server import embedded_redis
from paceline.cli.roles import ENV_PREFIX, ProbeUrl, Role, Settings, make_child, probe_url
from paceline.cli.run_folder import RunFolder
from paceline.cli.setup_error import SetupError
from paceline.core.errors import Cancelled
from paceline.core.metrics import ROUTER_WORKER_UP

DRAIN_ORDER = (("gateway",), ("router",), ("prefill", "decode"), ("redis",))
POLL_S = 0.05

Show = Callable[[str, str], None]  # (process, what it does now)


def show_nothing(name: str, status: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What to run. `settings` of a role and `environment` reach the services as they are; so do
    settings of one process, by its name, which come before those of its role."""

    model: Path
    prefill: int = 1
    decode: int = 1
    routers: int = 1
    gateways: int = 1  # processes behind the gateway's ports
    host: str = "127.0.0.1"  # of the gateway; everything else stays on loopback
    port: int = 0  # of the gateway's HTTP; 0: a free one
    grpc_port: int = 0
    redis_url: str = ""  # empty: an embedded server
    secret: str = field(default="", repr=False)  # of the deployment; empty: one is drawn
    settings: Mapping[str, Settings] = field(default_factory=dict)  # by role or process
    environment: Mapping[str, str] = field(default_factory=dict)
    run_parent: Path | None = None  # where the private run folder goes; None: the system's
    restart: bool = True
    ready_timeout_s: float = 180.0
    drain_timeout_s: float = 40.0  # of each of the four groups

    def settings_of(self, name: str, role: Role) -> Settings:
        return {**self.settings.get(role, {}), **self.settings.get(name, {})}


class Cluster:
    """Use as a context manager, or call start() and stop(). Methods may be called by any thread."""

    def __init__(self, spec: ClusterSpec, show: Show = show_nothing) -> None:
        self.spec = spec
        self.processes: dict[str, Child] = {}
        self.urls: dict[str, ProbeUrl] = {}  # of probes and metrics, by process
        self.secret = spec.secret or secrets.token_hex(32)
        self._folder: RunFolder | None = None
        self.redis_url = spec.redis_url
        self._show = show
        self._cancelled = threading.Event()
        self._grpc_port = 0
        self._http = ProbeUrl("", 0)
        self._operator_ports: Sequence[int] = ()
        self._router_endpoints: list[str] = []
        self._next_number = {"prefill": 0, "decode": 0}
        self._mark = secrets.token_hex(3)  # of our workers at a Redis that others use, too
        # Children die with the thread that starts them, so one thread starts them all.
        self._spawner = ThreadPoolExecutor(1, "spawner")
        self._keeper = Keeper(self._spawn, show)

    @property
    def base_url(self) -> str:
        """Of the gateway's HTTP."""
        return str(self._http)

    @property
    def grpc_endpoint(self) -> str:
        """Of the gateway's GenerateService."""
        return str(ProbeUrl(self._http.host, self._grpc_port)).removeprefix("http://")

    @property
    def operator_urls(self) -> list[str]:
        """Of the pages for operators of each process of the gateway: /debug/requests."""
        return [f"http://127.0.0.1:{port}" for port in self._operator_ports]

    @property
    def folder(self) -> RunFolder:
        assert self._folder is not None, "it was not started"
        return self._folder

    @property
    def run_dir(self) -> Path:
        return self.folder.path

    def start(self) -> None:
        """Returns when all are ready. Raises SetupError, after stopping all that had started."""
        self._folder = RunFolder(self.spec.run_parent)
        try:
            self.folder.write_secret(self.secret)
            self._start_redis()
            for i in range(self.spec.routers):
                self._start_router(f"router-{i}" if i else "router")
            for _ in range(self.spec.prefill):
                self._start_worker("prefill")
            for _ in range(self.spec.decode):
                self._start_worker("decode")
            self._start_gateway()
            self.wait_ready([name for name in self.processes if name != "redis"])
            self.wait_connected(self.spec.prefill + self.spec.decode)
        except BaseException as error:
            self.kill_all()
            cancelled = isinstance(error, Cancelled)
            for child in self.processes.values():
                child.process.wait()
                if cancelled:
                    self._show(child.name, "stopped")
            has_logs = bool(self.processes) and not cancelled
            self._let_go(self.folder.leave if has_logs else self.folder.remove)
            raise
        self._keeper.start(self.processes, restart=self.spec.restart)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def add_worker(self, role: Role) -> str:
        """Starts one more worker and waits until it is ready; its name."""
        name = self._start_worker(role)
        self.wait_ready([name])
        return name

    def wait_ready(self, names: list[str] | None = None) -> None:
        """Raises SetupError when one dies or time is over, Cancelled after cancel()."""
        waiting = dict.fromkeys(names or self.processes, "starting")
        deadline = time.monotonic() + self.spec.ready_timeout_s
        while waiting:
            for name, shown in list(waiting.items()):
                reason = self._look_at(name, deadline)
                if reason != shown:
                    self._show(name, reason or "ready")
                waiting[name] = reason
            waiting = {name: reason for name, reason in waiting.items() if reason}
            time.sleep(POLL_S)

    def wait_connected(self, num_workers: int, timeout_s: float | None = None) -> None:
        """Until each router knows so many: before, requests are planned without the others. Raises
        SetupError when time is over, the start's own if None, or Cancelled."""
        limit_s = self.spec.ready_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        for name in [name for name in self.processes if name.startswith("router")]:
            while num_connected(f"{self.urls[name]}/metrics") < num_workers:
                self._look_at(name, deadline)
                if time.monotonic() > deadline:
                    what = f"did not find {num_workers} workers in {limit_s:.0f} s"
                    raise SetupError(self._blame(self.processes[name], what))
                time.sleep(POLL_S)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[name].send(number)

    def cancel(self) -> None:
        """Ends a start() that waits, in another thread or from a signal handler."""
        self._cancelled.set()

    def kill_all(self) -> None:
        """Ends everything at once, without a drain."""
        self._cancelled.set()
        self._keeper.stop()
        for child in list(self.processes.values()):  # a start may be adding one
            if child.is_running:
                child.send(signal.SIGKILL)

    def stop(self) -> bool:
        """Drains and ends all, in order. True if each left by itself with code 0."""
        self._keeper.stop()
        clean = True
        with ThreadPoolExecutor(max(1, len(self.processes)), "stopper") as stoppers:
            for roles in DRAIN_ORDER:
                group = [c for c in self.processes.values() if c.name.split("-")[0] in roles]
                group = [child for child in group if child.is_running]
                for child in group:
                    self._show(child.name, "draining")
                clean &= all(stoppers.map(self._end, group))
        keep_logs = not clean or self._keeper.num_restarts > 0
        self._let_go(self.folder.keep if keep_logs else self.folder.remove)
        return clean

    def _let_go(self, end_folder: Callable[[], None]) -> None:
        self._spawner.shutdown()
        for child in self.processes.values():
            child.close()
        end_folder()

    def _end(self, child: Child) -> bool:
        clean = child.end(self.spec.drain_timeout_s)
        self._show(child.name, "stopped" if clean else child.ending())
        return clean

    def _look_at(self, name: str, deadline: float) -> str:
        """Why it is not ready; empty when it is."""
        child = self.processes[name]
        if self._cancelled.is_set():
            raise Cancelled("stopped before everything was ready")
        if not child.is_running:
            raise SetupError(self._blame(child, f"{child.ending()} while it started"))
        reason = child.probe()
        if reason and time.monotonic() > deadline:
            wait = f"{self.spec.ready_timeout_s:.0f} s"
            raise SetupError(self._blame(child, f"was not ready after {wait} ({reason})"))
        return reason

    def _blame(self, child: Child, what: str) -> str:
        return f"{child.name} {what}; the end of {child.log_path}:\n{child.tail()}"

    def _start_redis(self) -> None:
        if self.redis_url:
            return
        server = embedded_redis(free_port("127.0.0.1"), self.run_dir)
        self.redis_url = server.url

        def prepare() -> None:
            self.folder.restore()
            server.write_config()

        log_path, environment = self.run_dir / "redis.log", dict(os.environ)
        self._add(
            Child("redis", server.command, environment, log_path, server.probe, prepare=prepare)
        )
        self.wait_ready(["redis"])

    @property
    def router_endpoint(self) -> str:
        """Of the first router."""
        return self._router_endpoints[0]

    @property
    def router_endpoints(self) -> str:
        """Of all, comma-separated."""
        return ",".join(self._router_endpoints)

    def _start_router(self, name: str) -> None:
        port = free_port("127.0.0.1")
        self._router_endpoints.append(f"127.0.0.1:{port}")
        common = {"port": port, "probe_port": free_port("127.0.0.1")}
        self._start_service(name, "router", {**common, "redis_url": self.redis_url})

    def _start_gateway(self) -> None:
        host, count = self.spec.host, self.spec.gateways
        self._grpc_port = self.spec.grpc_port or free_port(host)
        self._operator_ports = free_ports("127.0.0.1", count)
        settings: dict[str, object] = {
            "host": host,
            "operator_address": f"127.0.0.1:{self._operator_ports[0]}",
            "port": self.spec.port or free_port(host),
            "grpc_port": self._grpc_port,
            "processes": count,
            "spread_routers": count > 1,
            "model": self.spec.model,
            "router": tuple(self._router_endpoints),
        }
        probes = free_ports(host, count) if count > 1 else ()
        if probes:
            settings["probe_port"] = probes[0]
        self._start_service("gateway", "gateway", settings)
        self._http = self.urls["gateway"]
        for number, port in enumerate(probes):
            name = f"gateway-{number}" if number else "gateway"
            self.urls[name] = replace(self._http, port=port)
        if probes:
            urls = [url for name, url in self.urls.items() if name.startswith("gateway")]
            self.processes["gateway"].probe = partial(first_not_ready, urls)

    def _start_worker(self, role: Role) -> str:
        name = f"{role}-{self._next_number[role]}"
        self._next_number[role] += 1
        settings = {
            "worker_id": f"{name}-{self._mark}" if self.spec.redis_url else name,
            "port": free_port("127.0.0.1"),
            "probe_port": free_port("127.0.0.1"),
            "model": self.spec.model,
            "redis_url": self.redis_url,
            "run_dir": self.run_dir,
        }
        self._start_service(name, role, settings)
        return name

    def _start_service(self, name: str, role: Role, settings: Settings) -> None:
        merged = {"host": "127.0.0.1", **settings, **self.spec.settings_of(name, role)}
        environment = dict(self.spec.environment)
        environment[ENV_PREFIX[role] + "SECRET"] = self.secret
        self.urls[name] = probe_url(role, merged)
        self._add(make_child(name, role, merged, environment, self.folder))

    def _add(self, child: Child) -> None:
        self._spawn(child)
        self.processes[child.name] = child
        self._show(child.name, "starting")

    def _spawn(self, child: Child) -> None:
        self._spawner.submit(child.start).result()


def first_not_ready(urls: Sequence[ProbeUrl]) -> str:
    """Why not all are ready; empty when they are."""
    return next(filter(None, (url.not_ready() for url in urls)), "")


def num_connected(url: str) -> int:
    """Workers, by the metrics of a router."""
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return 0
    return sum(line.startswith(f"{ROUTER_WORKER_UP}{{") and line.endswith(" 1.0") for line in lines)
