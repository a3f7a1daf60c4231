"""`paceline role`: who does what, and another role for one worker while it serves."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.console import Console

from paceline.cli.router_calls import RouterCalls, check_routers
from paceline.cli.top_table import empty_table
from paceline.core.config import check_secret, setting
from paceline.core.errors import ConfigError, InvalidRequest
from paceline.core.metric_labels import ROLES
from paceline.core.tls import PLAIN, TlsConfig
from paceline.rpc.convert import role_name
from paceline.v1 import control_pb2, worker_pb2

NEWS_S = 3.0  # in which a router hears of a change
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class RoleConfig:
    """Without WORKER: show the workers of a router and their roles. With it: the one of that id
    does from now on what ROLE says. What it runs of its old role ends by itself, or goes on at
    another worker; KV that it holds stays where it is. docs/operations.md says when that helps."""

    env_prefix: ClassVar[str] = "PACELINE_ROLE_"

    worker: str = setting("", "Id of a worker; without one all are listed.", positional=True)
    role: str = setting("", "prefill, decode, or both.", positional=True)
    wait: bool = setting(False, "Return only when nothing of its old role runs there any more.")
    drain_s: float = setting(
        0.0,
        "What still runs of its old role after that goes on elsewhere; 0: the worker's own"
        " drain_timeout_s.",
    )
    force: bool = setting(False, "Also where no other worker decodes its model.")
    router: tuple[str, ...] = setting(
        ("127.0.0.1:9100",),
        "gRPC addresses of routers, host:port, as the gateway has them; one that answers.",
    )
    secret: str = setting("", "The deployment's secret, which opens the routers.", secret=True)
    tls: TlsConfig = PLAIN

    def __post_init__(self) -> None:
        check_secret(self.secret, self.env_prefix)
        check_routers(self.router)
        drain = self.drain_s
        ConfigError.check("drain_s", drain, 0 <= drain < 4e6, "must lie between 0 and 4000000")
        if self.worker:
            reason = f"must be {', '.join(ROLES[:-1])} or {ROLES[-1]}"
            ConfigError.check("role", self.role, self.role in ROLES, reason)


def run(config: RoleConfig) -> int:
    """Raises InvalidRequest, Unavailable or IncompatiblePeer."""
    calls = RouterCalls(config.router, config.secret, config.tls)
    if config.worker:
        asyncio.run(change(config, calls))
    else:
        show(asyncio.run(calls.workers()).workers)
    return 0


async def change(config: RoleConfig, calls: RouterCalls) -> None:
    workers = await calls.known_workers()
    info = worker_of(config.worker, workers)
    must_leave_one = config.role == "prefill" and not config.force
    if must_leave_one:
        check_decode_is_left(info, workers)
    before = role_name(info.role)
    request = worker_pb2.ChangeRoleRequest(
        worker_id=config.worker,
        role=f"ROLE_{config.role.upper()}",
        reason="command",
    )
    if config.drain_s:
        request.drain_ms = round(1000 * config.drain_s)
    version, num_leaving = None, None
    async for state in calls.change_role(request):
        if version is None:
            version = state.version
            if must_leave_one:
                await check_again(calls, info, version)
            print(f"{config.worker}: {before} → {config.role}")
        if state.version != version:
            print(f"{config.worker}: its role was changed again meanwhile")
            return
        if state.num_leaving != num_leaving:
            num_leaving = state.num_leaving
            runs = "request of its old role still runs"
            if num_leaving != 1:
                runs = "requests of its old role still run"
            print(f"{config.worker}: {num_leaving} {runs}")
        if not config.wait:
            return


async def check_again(calls: RouterCalls, info: worker_pb2.WorkerInfo, version: int) -> None:
    """Two commands at once may each have seen the other's worker decode. Raises InvalidRequest,
    with the role as it was before."""
    until = asyncio.get_running_loop().time() + NEWS_S
    workers = await calls.known_workers()
    while not knows(workers, info.worker_id, version):
        if asyncio.get_running_loop().time() > until:
            break
        await asyncio.sleep(LOOK_S)
        workers = await calls.known_workers()
    try:
        check_decode_is_left(info, workers)
    except InvalidRequest:
        back = worker_pb2.ChangeRoleRequest(
            worker_id=info.worker_id, role=info.role, if_version=version, reason="command"
        )
        async for _ in calls.change_role(back):
            break
        raise


def knows(workers: Sequence[control_pb2.KnownWorker], worker_id: str, version: int) -> bool:
    """That its role has changed."""
    return any(w.info.worker_id == worker_id and w.info.role_version >= version for w in workers)


def worker_of(worker_id: str, workers: Sequence[control_pb2.KnownWorker]) -> worker_pb2.WorkerInfo:
    """Raises InvalidRequest, which names those that there are."""
    for worker in workers:
        if worker.info.worker_id == worker_id:
            return worker.info
    names = ", ".join(worker.info.worker_id for worker in workers)
    known = f"connected are {names}" if names else "no worker is connected"
    raise InvalidRequest("worker", worker_id, f"the router knows no such one; {known}")


def check_decode_is_left(
    info: worker_pb2.WorkerInfo, workers: Sequence[control_pb2.KnownWorker]
) -> None:
    """Beside this worker. Raises InvalidRequest."""
    others = (
        worker
        for worker in workers
        if worker.is_usable
        and worker.info.worker_id != info.worker_id
        and worker.info.content_digest == info.content_digest
        and worker.info.role != worker_pb2.ROLE_PREFILL
    )
    reason = (
        f"nobody else decodes {info.model}: its requests would fail; --force says that they may"
    )
    InvalidRequest.check("role", "prefill", next(others, None) is not None, reason)


def show(workers: Sequence[control_pb2.KnownWorker]) -> None:
    table = empty_table("workers")
    for heading in ("worker", "role", "model", "runs", "waits", "state"):
        table.add_column(heading)
    for worker in workers:
        load, info = worker.load, worker.info
        state = "draining" if load.draining else "ok" if worker.is_usable else "silent or stuck"
        counts = str(load.num_running), str(load.num_waiting)
        table.add_row(info.worker_id, role_name(info.role), info.model, *counts, state)
    Console().print(table)
