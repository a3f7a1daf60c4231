"""What a worker's role allows, and how it changes while requests run.

    change → routers are told, in order, on their streams; the record in Redis follows
           → from now on they plan by the new role; what crosses with the news is still served
           → what runs of a role that was left ends by itself, or is given up after a while: its
             router goes on elsewhere, after the tokens so far

Engine, pool, prefix cache and incarnation do not know the role: nothing is lost, all stays named
and exported. The role outlives the rank, but not the process, which starts in its command's.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import structlog

from paceline.core.errors import InvalidRequest, Unavailable
from paceline.core.metric_labels import ROLE_REASONS
from paceline.rpc import records
from paceline.rpc.convert import role_name
from paceline.v1 import worker_pb2
from paceline.worker.router_stream import GivenUp

if TYPE_CHECKING:
    from paceline.worker.session import Session
    from paceline.worker.slots import SlotState

PREFILL, DECODE, BOTH = worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE, worker_pb2.ROLE_BOTH
ROLES: Final = (PREFILL, DECODE, BOTH)
_ROLES_OF_COMMAND = {"prefill": (PREFILL, BOTH), "reserve": (DECODE, BOTH)}  # others: all

_log = structlog.get_logger("paceline.worker")


class WorkerRole:
    """Of one front process. On the event loop. `crossing_s`: how long commands for the role before
    are still served, since routers may not have heard of the change."""

    def __init__(self, role: worker_pb2.Role, crossing_s: float) -> None:
        self.role = role
        self.version = 0
        self._before = role
        self._changed_at = float("-inf")
        self._crossing_s = crossing_s
        self._timer: asyncio.TimerHandle | None = None

    def allows(self, command: str) -> bool:
        roles = _ROLES_OF_COMMAND.get(command, ROLES)
        is_crossing = time.monotonic() - self._changed_at < self._crossing_s
        return self.role in roles or (is_crossing and self._before in roles)

    def describe(self, info: worker_pb2.WorkerInfo, secret: bytes) -> None:
        """Brings a record up to date, its signature too."""
        info.role, info.role_version = self.role, self.version
        records.sign(info, secret)

    def change(self, session: "Session", request: worker_pb2.ChangeRoleRequest) -> None:
        """At once. Raises InvalidRequest for what is no role or is meant for another worker or
        version, Unavailable while the worker drains."""
        self._check(session, request)
        if request.role == self.role:
            return
        self._before, self.role = self.role, request.role
        self.version += 1
        self._changed_at = time.monotonic()
        session.metrics.role_changed(role_name(self.role), request.reason)
        self.describe(session.info, session.secret)
        session.announce()
        num_leaving = self.num_leaving(session)
        _log.info(
            "role changed",
            role=role_name(self.role),
            version=self.version,
            reason=request.reason,
            leaving=num_leaving,
        )
        own_s = session.config.drain_timeout_s
        drain_s = request.drain_ms / 1000 if request.HasField("drain_ms") else own_s
        self._give_up_after(session, drain_s)

    def state(self, session: "Session") -> worker_pb2.RoleState:
        num_leaving = self.num_leaving(session)
        return worker_pb2.RoleState(role=self.role, version=self.version, num_leaving=num_leaving)

    def num_leaving(self, session: "Session") -> int:
        return sum(1 for _ in self._leaving(session))

    def _check(self, session: "Session", request: worker_pb2.ChangeRoleRequest) -> None:
        check = InvalidRequest.check
        names = ", ".join(map(role_name, ROLES))
        check("role", request.role, request.role in ROLES, f"must be one of {names}")
        is_us = request.worker_id == session.info.worker_id
        check("worker_id", request.worker_id, is_us, f"this is {session.info.worker_id}")
        reason = f"must be one of {', '.join(ROLE_REASONS)}"
        check("reason", request.reason, request.reason in ROLE_REASONS, reason)
        if request.HasField("if_version") and request.role != self.role:
            is_current = request.if_version == self.version
            why = f"the role has changed meanwhile: it is {role_name(self.role)}, {self.version}"
            check("if_version", request.if_version, is_current, why)
        if session.draining:
            raise Unavailable("the worker is draining", retry_after_s=1.0)

    def _leaving(self, session: "Session") -> "Iterator[SlotState]":
        """What runs of a role that the worker has not any more."""
        return (slot for slot in session.slots if not self._covers(slot) and not slot.ending)

    def _covers(self, slot: "SlotState") -> bool:
        if slot.handoff is not None:
            return self.role != DECODE
        return self.role != PREFILL or not slot.decodes

    def _give_up_after(self, session: "Session", drain_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(drain_s, self._give_up, session)

    def _give_up(self, session: "Session") -> None:
        """What has not ended goes on elsewhere."""
        error = GivenUp("the worker has another role now", retry_after_s=0.1)
        for slot in self._leaving(session):
            session.end(slot, error)
