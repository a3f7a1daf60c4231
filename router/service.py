"""The router as a service: start, ready, drain, stop."""

import asyncio
import contextlib
from typing import Any

import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.core import keys
from paceline.core.errors import ConfigError
from paceline.core.tls_metrics import CertificateMetrics
from paceline.router.config import RouterConfig
from paceline.router.coordinator import Coordinator
from paceline.router.fleet import Fleet
from paceline.router.gateway_stream import RouterServicer
from paceline.router.index import PrefixIndex
from paceline.router.metrics import RouterMetrics
from paceline.router.mirror import MirrorSet
from paceline.router.operator_calls import OperatorCalls
from paceline.router.redis_follower import RedisFollower
from paceline.router.redis_reader import RedisReader
from paceline.rpc import channel
from paceline.rpc.probes import ProbeServer
from paceline.rpc.tracing import make_tracing
from paceline.v1 import control_pb2, control_pb2_grpc

TICK_S = 0.05  # waiting requests look again: pauses after Busy end without a frame
HOUSEKEEPING_S = 1.0
SETTLE_S = 3.0  # how long a new router looks for workers before it speaks for those it has found
_SERVICE = control_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name

log = structlog.stdlib.get_logger("paceline.router")


class Router:
    """Create it inside a running event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics = RouterMetrics()
        self.metrics.registry.register(CertificateMetrics(config.tls))
        self.index = PrefixIndex(config.index_mib << 20)
        self.mirrors = MirrorSet(self.index)
        self.fleet = Fleet(config, self.metrics)
        self._tracing = make_tracing(config.otlp_endpoint, "router", self.metrics.registry)
        self.coordinator = Coordinator(
            config, self.fleet, self.mirrors, self.metrics, self._tracing
        )
        self.port = self.probe_port = 0
        self._reader = RedisReader(config.redis_url, config.redis_timeout_s, self.metrics.refused)
        self.follower = RedisFollower(
            self._reader, self.fleet, self.mirrors, self.metrics, config.secret
        )
        self._probes = ProbeServer(
            config.host, config.probe_port, self.reasons, self.metrics.registry
        )
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = channel.make_server(config.secret.encode(), tls=config.tls)
        operator_calls = OperatorCalls(config, self.fleet)
        self._servicer = RouterServicer(config, self.coordinator, operator_calls)
        self._is_settled = False
        self._tasks: list[asyncio.Task[None]] = []
        self._settling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens. Raises ConfigError when a port is taken."""
        keys.self_test()
        self.fleet.on_models = self._tell_models
        control_pb2_grpc.add_RouterServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self._servicer, self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            address = f"{self.config.host}:{self.config.port}"
            self.port = channel.listen(self._server, address, self.config.tls)
        except RuntimeError:
            reason = f"cannot be bound on {self.config.host}: is it taken?"
            raise ConfigError("port", self.config.port, reason) from None
        self.probe_port = await self._probes.start()
        await self._server.start()
        work = (self.follower.run(), self._tick(), self._keep_house())
        self._tasks = [asyncio.create_task(part) for part in work]
        self._settling = asyncio.create_task(self._settle())
        log.info("listening", port=self.port, probe_port=self.probe_port)

    def reasons(self) -> list[str]:
        """Why no traffic should come here."""
        found = []
        if self.coordinator.draining:
            found.append("draining")
        if not self.fleet.has_decode_worker():
            found.append("no decode worker is connected")
        elif not self._is_settled:
            found.append("workers are being connected to")
        return found

    async def failed(self) -> None:
        """Returns when a part that should run for ever has ended: a bug, and time to leave."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    def failure(self) -> BaseException | None:
        return next((task.exception() for task in self._tasks if task.done()), None)

    async def drain(self) -> None:
        """Takes nothing new and finishes what runs; gateways take the rest to another router."""
        self.coordinator.draining = True
        self._servicer.say_draining()
        await self._health.set(_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.coordinator.drain(self.config.drain_timeout_s)
        await asyncio.sleep(TICK_S)  # last frames leave

    async def stop(self) -> None:
        tasks = [*self._tasks, *filter(None, (self._settling,))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.coordinator.drain(0)
        await asyncio.to_thread(self._tracing.close)
        await self._server.stop(grace=0.5)
        await self.fleet.close()
        await self._probes.stop()
        await self._reader.close()

    async def _settle(self) -> None:
        """A router that spoke before it knows all workers would call their models unknown."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                await self.follower.looked.wait()
                await self.fleet.dialled()
        self._is_settled = True
        self._tell_models()

    def _tell_models(self) -> None:
        if self._is_settled:
            self._servicer.set_models(self.fleet.models())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.coordinator.queue.wake()

    async def _keep_house(self) -> None:
        serving = None
        while True:
            self.fleet.refresh_models(asyncio.get_running_loop().time())
            if serving != (serving := not self.reasons()):
                await self._health.set(_SERVICE, _status(serving))
            for _ in self.index.sweep():
                await asyncio.sleep(0)
            self._report()
            await asyncio.sleep(HOUSEKEEPING_S)

    def _report(self) -> None:
        self.fleet.report()
        self.metrics.queue_length.set(len(self.coordinator.queue))
        self.metrics.in_flight.set(self.coordinator.num_in_flight)
        self.metrics.index_keys.set(len(self.index))
        self.metrics.index_bytes.set(self.index.num_bytes)


def _status(serving: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    statuses = health_pb2.HealthCheckResponse
    return statuses.SERVING if serving else statuses.NOT_SERVING
