"""`paceline gateway`: start, ready, drain, stop."""

import asyncio
import gc
import os
import resource
import signal
import sys

import uvloop

from paceline.core import keys, logs
from paceline.core.probes import ProbeServer
from paceline.gateway.app import make_app
from paceline.gateway.config import GatewayConfig
from paceline.gateway.grpc_server import GrpcServer
from paceline.gateway.http_limits import CUT_S
from paceline.gateway.http_server import HttpServer
from paceline.gateway.serving import Serving

_STOP_MARGIN_S = 1.0  # for connections that are cut
_MAX_FILES = 1 << 16  # wanted for connections; shells often allow 1024
_SWITCH_INTERVAL_S = 0.001  # a thread that renders a template may hold the loop up that long


class GatewayServer:
    """Both ports over one Serving. start() → (router attaches: ready) → drain() → stop()."""

    def __init__(self, config: GatewayConfig) -> None:
        self.serving = Serving(config)
        self._drain_timeout_s = config.drain_timeout_s
        self._grpc = GrpcServer(self.serving, config)
        self._http = HttpServer(make_app(self.serving), config)
        self._operators = _operator_server(self.serving, config)
        self.operator_port = 0  # none
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
        if self._operators is not None:
            self.operator_port = await self._operators.start()
        await self._grpc.start()
        await self._http.start()
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
        if self._operators is not None:
            await self._operators.stop()
        await asyncio.gather(*self._health_updates)

    def _update_health(self) -> None:
        is_ready = not self.serving.reasons()
        update = asyncio.get_running_loop().create_task(self._grpc.set_ready(is_ready))
        self._health_updates.add(update)
        update.add_done_callback(self._health_updates.discard)


def _operator_server(serving: Serving, config: GatewayConfig) -> ProbeServer | None:
    if not config.operator_address:
        return None
    host, _, port = config.operator_address.rpartition(":")
    return ProbeServer(
        host.strip("[]"),
        int(port),
        serving.reasons,
        serving.metrics.registry,
        {"/debug/requests": serving.requests_page},
        setting="operator_address",
    )


def run(config: GatewayConfig) -> int:
    """Blocks until SIGTERM or SIGINT, drains, returns 0. Raises ConfigError."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its own pool would mix short and long texts
    _allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config))


async def _serve(config: GatewayConfig) -> int:
    logger = logs.configure("gateway")
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, asked_to_stop.set)
    server = GatewayServer(config)
    await server.start()
    gc.freeze()  # what start-up made stays: no need to look at it again
    ports = {"port": server.port, "grpc_port": server.grpc_port}
    logger.info("listening", host=config.host, **ports, operator_port=server.operator_port)
    await asked_to_stop.wait()
    logger.info("draining", timeout_s=config.drain_timeout_s)
    await server.drain()
    await server.stop()
    logger.info("stopped")
    return 0


def _allow_many_files() -> None:
    """As many as are wanted, within the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
