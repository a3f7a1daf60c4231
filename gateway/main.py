"""One process of `paceline gateway`: start, ready, drain, stop."""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import uvloop

from paceline.core import keys, logs
from paceline.gateway.app import make_app
from paceline.gateway.config import GatewayConfig
from paceline.gateway.grpc_server import GrpcServer
from paceline.gateway.http_limits import CUT_S
from paceline.gateway.http_server import HttpServer
from paceline.gateway.serving import Serving
from paceline.gateway.usage import Usages
from paceline.rpc.probes import ProbeServer

_STOP_MARGIN_S = 1.0  # for connections that are cut
_MAX_FILES = 1 << 16  # wanted for connections; shells often allow 1024
_READY_S = 5.0  # how long one that shares its ports looks for a router before it listens
_BEAT_S = 1.0
_SWITCH_INTERVAL_S = 0.001  # a thread that renders a template may hold the loop up that long


@dataclass(frozen=True, slots=True)
class Place:
    """Of a process among those of its gateway. `listens` is called once it does, `beat` every
    second from then on, unless the event loop stands still."""

    number: int = 0
    usages: Usages | None = None
    listens: Callable[[], None] = lambda: None
    beat: Callable[[], None] = lambda: None


ALONE = Place()


class GatewayServer:
    """Both ports over one Serving. start() → (router attaches: ready) → drain() → stop().

    One that shares its ports with other processes listens when it is ready, if that is soon:
    connections come to whoever listens."""

    def __init__(self, config: GatewayConfig, place: Place = ALONE) -> None:
        self.serving = Serving(config, usages=place.usages)
        self._shares_ports = config.shares_ports
        self._drain_timeout_s = config.drain_timeout_s
        self._grpc = GrpcServer(self.serving, config)
        self._http = HttpServer(make_app(self.serving), config)
        self._probes = _probe_server(self._not_ready, self.serving, config, place.number)
        self._operators = _operator_server(self.serving, config, place.number)
        self.probe_port = self.operator_port = 0  # none
        self._is_ready = asyncio.Event()
        self._listens = False
        self._health_updates: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        return self._http.port

    @property
    def grpc_port(self) -> int:
        return self._grpc.port

    async def start(self) -> None:
        """Listens, then looks for a router; readiness tells when it has one."""
        keys.self_test()
        if self._probes is not None:
            self.probe_port = await self._probes.start()
        if self._operators is not None:
            self.operator_port = await self._operators.start()
        if self._shares_ports:
            self._look_for_router()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_ready.wait(), _READY_S)
        await self._grpc.set_ready(not self.serving.reasons())
        await self._grpc.start()
        await self._http.start()
        self._listens = True
        if not self._shares_ports:
            self._look_for_router()

    def _not_ready(self) -> list[str]:
        return self.serving.reasons() or ([] if self._listens else ["does not listen yet"])

    def _look_for_router(self) -> None:
        self.serving.on_change = self._update_health
        self.serving.authentication.start()
        self.serving.router.start()

    async def drain(self) -> None:
        """Takes no new requests; running ones end, by themselves within the drain timeout or with
        an error after it."""
        self.serving.start_draining()
        stops = [asyncio.create_task(port.stop()) for port in (self._http, self._grpc)]
        _, pending = await asyncio.wait(stops, timeout=self._drain_timeout_s)
        if pending:
            self.serving.end_running()
            await asyncio.wait(pending, timeout=CUT_S + _STOP_MARGIN_S)

    async def stop(self) -> None:
        self.serving.prompts.close()
        await asyncio.to_thread(self.serving.tracing.close)
        await self.serving.authentication.stop()
        await self.serving.router.stop()
        for server in filter(None, (self._operators, self._probes)):
            await server.stop()
        await asyncio.gather(*self._health_updates)

    def _update_health(self) -> None:
        is_ready = not self.serving.reasons()
        if is_ready:
            self._is_ready.set()
        update = asyncio.get_running_loop().create_task(self._grpc.set_ready(is_ready))
        self._health_updates.add(update)
        update.add_done_callback(self._health_updates.discard)


def _probe_server(
    reasons: Callable[[], list[str]], serving: Serving, config: GatewayConfig, number: int
) -> ProbeServer | None:
    """Of one that shares its ports, where any of them may answer."""
    if not config.shares_ports:
        return None
    port = config.probe_port + number if config.probe_port else 0
    return ProbeServer(config.host, port, reasons, serving.metrics.registry)


def _operator_server(serving: Serving, config: GatewayConfig, number: int) -> ProbeServer | None:
    if not config.operator_address:
        return None
    host, _, first = config.operator_address.rpartition(":")
    return ProbeServer(
        host.strip("[]"),
        int(first) + number if int(first) else 0,
        serving.reasons,
        serving.metrics.registry,
        {"/debug/requests": serving.requests_page},
        setting="operator_address",
    )


def run(config: GatewayConfig, place: Place = ALONE) -> int:
    """Blocks until SIGTERM or SIGINT, drains, returns 0; SIGHUP has the key file read again. Raises
    ConfigError."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its own pool would mix short and long texts
    _allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, place))


async def _serve(config: GatewayConfig, place: Place) -> int:
    logger = logs.configure("gateway")
    if config.shares_ports:
        structlog.contextvars.bind_contextvars(process=place.number)
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, asked_to_stop.set)
    server = GatewayServer(config, place)
    loop.add_signal_handler(signal.SIGHUP, server.serving.authentication.read_again)
    await server.start()
    gc.freeze()  # what start-up made stays: no need to look at it again
    ports = {"port": server.port, "grpc_port": server.grpc_port}
    ports |= {"probe_port": server.probe_port} if config.shares_ports else {}
    logger.info("listening", host=config.host, **ports, operator_port=server.operator_port)
    place.listens()
    beats = loop.create_task(_beat(place), name="beats")
    await asked_to_stop.wait()
    logger.info("draining", timeout_s=config.drain_timeout_s)
    await server.drain()
    await server.stop()
    beats.cancel()
    logger.info("stopped")
    return 0


async def _beat(place: Place) -> None:
    while True:
        await asyncio.sleep(_BEAT_S)
        place.beat()


def _allow_many_files() -> None:
    """As many as are wanted, within the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
