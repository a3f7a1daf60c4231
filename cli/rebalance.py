"""`paceline rebalance`: moves workers between prefill and decode as their queues ask for.

Every `interval_s` it asks the routers who is there and what waits; router/role_balance.py decides,
and at most one role is changed, through a router, as `paceline role` does. A change names the
version of the role that it was decided on: what somebody else has made of it meanwhile stays. It
keeps nothing, and serving does not need it. One a deployment is enough.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from paceline import __version__
from paceline.cli.router_calls import RouterCalls, check_routers, newest
from paceline.core import logs
from paceline.core import metrics as names
from paceline.core.config import check_ports, check_positive, check_secret, setting
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.tls import PLAIN, TlsConfig
from paceline.router.role_balance import Flip, RoleBalance, Sides, Wanted, sides_of
from paceline.rpc.convert import role_name
from paceline.rpc.probes import ProbeServer
from paceline.v1 import control_pb2, worker_pb2

ANSWER_S = 15.0  # of a worker; a router that hangs costs some of it

_check = ConfigError.check
log = structlog.stdlib.get_logger("paceline.rebalance")


@dataclass(frozen=True, slots=True)
class RebalanceConfig:
    """Give workers the role whose queue is long, and take it back when the other's is."""

    env_prefix: ClassVar[str] = "PACELINE_REBALANCE_"

    router: tuple[str, ...] = setting(
        ("127.0.0.1:9100",), "gRPC addresses of all routers, host:port, as the gateway has them."
    )
    host: str = setting("127.0.0.1", "Address that the probes listen on.")
    probe_port: int = setting(9301, "HTTP port of /livez, /readyz and /metrics; 0: a free one.")
    prefill_s: float = setting(
        1.0, "Seconds of prompts ahead of a prefill worker that are too much."
    )
    decode_share: float = setting(0.8, "Share of the pages of decode in use that is too much.")
    hold_s: float = setting(15.0, "How long a role must have too much, the other some to spare.")
    cool_down_s: float = setting(60.0, "Least time between two changes of roles.")
    interval_s: float = setting(1.0, "Time between two looks.")
    secret: str = setting("", "The deployment's secret, which opens the routers.", secret=True)
    tls: TlsConfig = PLAIN

    def __post_init__(self) -> None:
        check_secret(self.secret, self.env_prefix)
        check_routers(self.router)
        check_ports(self, "probe_port")
        check_positive(self, "prefill_s", "decode_share", "interval_s")
        for name in ("hold_s", "cool_down_s"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "must not be negative")
        _check("decode_share", self.decode_share, self.decode_share <= 1, "must be at most 1")

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.prefill_s, self.decode_share, self.hold_s, self.cool_down_s)


class Rebalancer:
    """`run` until cancelled."""

    def __init__(self, config: RebalanceConfig) -> None:
        registry = self.registry = CollectorRegistry()
        names.SERVICE_INFO.gauge(registry).labels("rebalance", __version__).set(1)
        self._pressure = names.REBALANCE_PRESSURE.gauge(registry)
        self._calls = RouterCalls(config.router, config.secret, config.tls)
        self._config = config
        self._balance = RoleBalance(config.wanted)
        self._is_told: bool | None = None  # before the first look
        self.probes = ProbeServer(config.host, config.probe_port, self.reasons, registry)

    def reasons(self) -> list[str]:
        return [] if self._is_told else ["no router answers"]

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._config.interval_s)

    async def look(self) -> None:
        """Once; changes a role if it is time."""
        told = await self._calls.workers_of_all()
        if bool(told) is not self._is_told:
            self._is_told = bool(told)
            await self._say(told)
        revisions = revisions_of(told, self._config.wanted)
        self._report(revisions.values())
        flip = self._balance.look(revisions, asyncio.get_running_loop().time())
        if flip is not None:
            await self._make(flip)

    async def _say(self, told: list[control_pb2.WorkersResponse]) -> None:
        """That routers tell now, or why none does."""
        if told:
            log.info("routers answer", num_routers=len(told), num_workers=len(newest(told)))
            return
        try:
            await self._calls.workers()
        except PacelineError as error:
            log.warning("no router answers", why=error.message)

    def _report(self, revisions: Collection[Sides]) -> None:
        """Of the revision that has it worst."""
        for role in ("prefill", "decode"):
            worst = max((getattr(sides, role).pressure for sides in revisions), default=0.0)
            self._pressure.labels(role).set(worst)

    async def _make(self, flip: Flip) -> None:
        info, role = flip.worker.info, role_name(flip.role)
        request = worker_pb2.ChangeRoleRequest(
            worker_id=info.worker_id,
            role=flip.role,
            if_version=info.role_version,
            reason="rebalance",
        )
        try:
            async with asyncio.timeout(ANSWER_S):
                async for _ in self._calls.change_role(request):
                    break
        except (PacelineError, TimeoutError) as error:
            why = str(error) or "no answer in time"
            log.warning("role not changed", worker=info.worker_id, role=role, why=why)
        else:
            log.info("role changed", worker=info.worker_id, role=role)


def revisions_of(told: list[control_pb2.WorkersResponse], wanted: Wanted) -> dict[str, Sides]:
    """Workers are those that any router knows."""
    num_queued = Counter[str]()
    for one in told:
        num_queued.update(one.num_queued_by_digest)
    digests: dict[str, list[control_pb2.KnownWorker]] = {}
    for worker in newest(told):
        digests.setdefault(worker.info.content_digest, []).append(worker)
    return {digest: sides_of(ones, num_queued[digest], wanted) for digest, ones in digests.items()}


def run(config: RebalanceConfig) -> int:
    """Until SIGTERM or SIGINT. Raises ConfigError when the port is taken."""
    logs.configure("rebalance")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config))


async def _serve(config: RebalanceConfig) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    rebalancer = Rebalancer(config)
    await rebalancer.probes.start()
    tasks = [asyncio.create_task(rebalancer.run()), asyncio.create_task(stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a bug of ours: let it be seen
    finally:
        for task in tasks:
            task.cancel()
        await rebalancer.probes.stop()
    return 0
