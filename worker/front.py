"""The front process of a worker: start, ready, drain, stop, and a rank kept running in between."""

import asyncio
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass

import structlog
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.core.errors import ConfigError, PacelineError, Unavailable
from paceline.core.ids import WorkerId
from paceline.core.tls_metrics import CertificateMetrics
from paceline.rpc.channel import listen, make_server
from paceline.rpc.convert import role_name
from paceline.rpc.probes import ProbeServer
from paceline.rpc.tracing import make_tracing
from paceline.v1 import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.worker.attach import AttachServicer
from paceline.worker.config import WorkerConfig
from paceline.worker.connectors import Connectors, make_connectors
from paceline.worker.introductions import Introductions
from paceline.worker.kv_service import KvTransferServicer
from paceline.worker.leaving import leave
from paceline.worker.metrics import WorkerMetrics
from paceline.worker.rank_process import RankProcess, launch
from paceline.worker.rank_program import RankProgram
from paceline.worker.redis_record import RedisRecord
from paceline.worker.role import WorkerRole
from paceline.worker.session import Session
from paceline.worker.worker_tiers import WorkerTiers

BACK_OFF_S = (0.05, 10.0)  # first, longest; it doubles while ranks die young
YOUNG_S = 30.0
HEALTH_PERIOD_S = 0.2
SERVICES = (
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,
    kv_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name,
)

_log = structlog.get_logger("paceline.worker")


@dataclass(frozen=True, slots=True)
class Side:
    """As what a worker starts; its role may change (worker/role.py)."""

    role: worker_pb2.Role
    name: str  # "prefill" | "decode"


class Front:
    """Call `start`, then `serve_until` a stop is asked for; `drain` and `stop` follow in it."""

    def __init__(self, config: WorkerConfig, side: Side, first_rank: RankProgram) -> None:
        self.config = config
        self.side = side
        self._first_rank = first_rank
        name = config.worker_id or f"{side.name}-{secrets.token_hex(4)}"
        self.worker_id = WorkerId(name)
        self.role = WorkerRole(side.role, config.timers.silence_s)
        self.metrics = WorkerMetrics(config.served_name, side.name)
        self.metrics.registry.register(CertificateMetrics(config.tls))
        self.session: Session | None = None
        self.port = 0
        self.probe_port = 0
        self._reason = "the model is being loaded"
        self._draining = False
        self._record = RedisRecord(config.redis_url, config.timers.beat_s)
        self._server = make_server(config.secret.encode(), tls=config.tls)
        self._health = health_aio.HealthServicer()
        self._probes = ProbeServer(
            config.host,
            config.probe_port,
            self.reasons,
            self.metrics.registry,
            details=self.details,
        )
        self._tiers = WorkerTiers(config, self._record, self.metrics.registry)
        self._tracing = make_tracing(
            config.otlp_endpoint, side.name, self.metrics.registry, instance=name
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._rank_task: asyncio.Task[None] | None = None

    # --- start ---

    async def start(self) -> None:
        """Binds the ports, then loads the model. Raises ConfigError for what cannot work."""
        self.probe_port = await self._probes.start()
        self._bind()
        await self._server.start()
        self._tasks.append(asyncio.create_task(self._reflect_health()))
        rank = await launch(self.config, self._first_rank)
        try:
            await self._tiers.open(rank.ready)
        except BaseException:
            await rank.close()
            raise
        self._rank_task = asyncio.create_task(self._keep_rank(rank))
        self._tasks.append(self._rank_task)
        _log.info("worker started", worker=self.worker_id, port=self.port)

    def _bind(self) -> None:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(  # type: ignore[no-untyped-call]
            AttachServicer(self.current), self._server
        )
        kv_pb2_grpc.add_KvTransferServiceServicer_to_server(  # type: ignore[no-untyped-call]
            KvTransferServicer(self.current), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            self.port = listen(self._server, f"{host}:{self.config.port}", self.config.tls)
        except RuntimeError:
            raise ConfigError("port", self.config.port, "cannot be bound, is it taken?") from None

    # --- ready ---

    def reasons(self) -> list[str]:
        """Why the worker is not ready; ready when empty."""
        if self._draining:
            return ["draining"]
        if self.session is None:
            return [self._reason]
        return ["the rank is stalled"] if self.session.is_stalled else []

    def details(self) -> list[str]:
        """What an operator should look at though we serve."""
        return self.session.peers.details() if self.session is not None else []

    def current(self) -> Session:
        """The session to attach to. Raises Unavailable while loading, restarting, draining."""
        if self.session is None:
            raise Unavailable(self._reason, retry_after_s=1.0)
        return self.session

    async def _reflect_health(self) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        while True:
            is_ready = not self.reasons()
            self.metrics.ready.set(is_ready)
            self.metrics.redis_up.set(self._record.is_up)
            self.metrics.observe_role(role_name(self.role.role))
            for name in ("", *SERVICES):
                await self._health.set(name, serving if is_ready else not_serving)
            await asyncio.sleep(HEALTH_PERIOD_S)

    # --- the rank ---

    async def _keep_rank(self, rank: RankProcess) -> None:
        """Runs one incarnation after the other, with back-off while they die young."""
        back_off_s = BACK_OFF_S[0]
        while True:
            started = time.monotonic()
            reason = await self._run_incarnation(rank)
            _log.error("rank lost", incarnation=rank.incarnation, reason=reason)
            if time.monotonic() - started > YOUNG_S:
                back_off_s = BACK_OFF_S[0]
            while True:
                await asyncio.sleep(back_off_s)
                back_off_s = min(2 * back_off_s, BACK_OFF_S[1])
                try:
                    rank = await launch(self.config)
                    break
                except PacelineError as error:
                    _log.error("rank does not start", reason=error.message)

    async def _run_incarnation(self, rank: RankProcess) -> str:
        info = self._describe(rank)
        await self._tiers.reopen(rank.ready)
        connectors = await asyncio.to_thread(self._connectors, rank)
        info.transports[:] = [name for name, _ in connectors.addresses()]
        self.role.describe(info, self.config.secret.encode())
        session = Session(
            self.config,
            rank,
            info,
            connectors,
            self.metrics,
            on_keys=self._record.add,
            role=self.role,
            tiers=self._tiers.stack,
            tracing=self._tracing,
        )
        session.draining = self._draining
        self.metrics.started(rank.ready, info.transports)
        self._record.publish(info)
        self.session = session
        meeting = asyncio.create_task(Introductions(self.config, info, session.peers).run())
        _log.info("rank ready", incarnation=rank.incarnation, pages=rank.ready.num_pages)
        try:
            return await session.run()
        finally:
            meeting.cancel()
            self._reason = "the rank is being restarted"
            self.session = None
            session.end_streams()
            await to_the_end(self._close(session))

    async def _close(self, session: Session) -> None:
        await self._record.withdraw()
        await session.close()

    def _connectors(self, rank: RankProcess) -> Connectors:
        return make_connectors(self.config, rank)

    def _describe(self, rank: RankProcess) -> worker_pb2.WorkerInfo:
        ready = rank.ready
        host = self.config.advertise_host or self.config.host
        zone, _, node = self.config.place.partition("/")
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            incarnation=rank.incarnation,
            endpoint=f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}",
            model=self.config.served_name,
            content_digest=ready.content_digest,
            layout_digest=ready.layout_digest,
            serving_digest=ready.serving_digest,
            context_length=ready.context_length,
            vocab_size=ready.vocab_size,
            hidden_size=ready.hidden_size,
            num_pages=ready.num_pages,
            page_bytes=ready.page_bytes,
            most_pages=ready.most_pages,
            zone=zone,
            node=node,
        )

    # --- drain ---

    async def drain(self) -> None:
        """Unready; then as worker/leaving.py tells, at most `drain_timeout_s`."""
        self._draining = True
        if self.session is not None:
            await leave(self.session, self.config.drain_timeout_s)

    # --- stop ---

    async def stop(self) -> None:
        """Ends everything at once. Safe after a start that failed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._tiers.close()
        await self._server.stop(grace=0.5)
        await asyncio.to_thread(self._tracing.close)
        await self._probes.stop()

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Start, serve, and at `stop` drain and stop. Raises what `start` raises."""
        stopping = asyncio.create_task(stop.wait())
        starting = asyncio.create_task(self.start())
        try:
            if await _comes_first(starting, stopping):
                assert self._rank_task is not None
                await _comes_first(self._rank_task, stopping)
                await self.drain()
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)
            await self.stop()


async def to_the_end(work: Coroutine[None, None, None]) -> None:
    """Does `work` whole. A cancel that comes meanwhile is kept, and takes effect after it."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


async def _comes_first(work: "asyncio.Task[None]", stopping: "asyncio.Task[bool]") -> bool:
    """True when `work` is done before a stop is asked for; raises what it raised."""
    await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        await work
    return work.done()
