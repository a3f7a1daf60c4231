"""Servicer of WorkerService: a router's commands in, frames out, while both live; roles.

It knows the commands of all roles; which the worker takes now, its role says (worker/role.py).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import structlog

from paceline.core.errors import EngineFailure, InvalidRequest, PacelineError, Unavailable
from paceline.rpc.convert import role_name
from paceline.v1 import worker_pb2, worker_pb2_grpc
from paceline.worker import actions
from paceline.worker.actions import Action
from paceline.worker.router_stream import GivenUp, RouterStream
from paceline.worker.session import Session

Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.get_logger("paceline.worker")

_ACTIONS: Mapping[str, Action] = {
    "run": actions.run,
    "prefill": actions.prefill,
    "reserve": actions.reserve,
    "adopt": actions.adopt,
    "cancel": actions.cancel,
    "revoke": actions.revoke,
    "let_go": actions.let_go,
}
_OPENS_SLOT = ("run", "reserve", "prefill")
_ROLE_PERIOD_S = 0.05  # between looks at what is left of a role


class AttachServicer(worker_pb2_grpc.WorkerServiceServicer):
    """`current` gives the session, or raises Unavailable while there is none to attach to."""

    def __init__(self, current: Callable[[], Session]) -> None:
        self._current = current

    async def Attach(
        self, request_iterator: AsyncIterator[worker_pb2.WorkerCommand], context: Context
    ) -> AsyncIterator[worker_pb2.WorkerFrame]:
        session = self._current()
        stream = RouterStream(asyncio.current_task())
        session.streams.add(stream)
        reader = asyncio.create_task(self._read(session, stream, request_iterator))
        try:
            yield worker_pb2.WorkerFrame(info=session.info, load=session.load_now())
            async for frame in stream.frames():
                yield frame
            if stream.end is not None:
                raise stream.end
        finally:
            reader.cancel()
            session.end_stream(stream, Unavailable("the router has left"))

    async def ChangeRole(
        self, request: worker_pb2.ChangeRoleRequest, context: Context
    ) -> AsyncIterator[worker_pb2.RoleState]:
        session = self._current()
        session.serve_in(asyncio.current_task())
        session.role.change(session, request)
        last: worker_pb2.RoleState | None = None
        while last is None or last.num_leaving:
            state = session.role.state(session)
            if state != last:
                last = state
                yield state
            else:
                await asyncio.sleep(_ROLE_PERIOD_S)

    async def _read(
        self,
        session: Session,
        stream: RouterStream,
        commands: AsyncIterator[worker_pb2.WorkerCommand],
    ) -> None:
        try:
            async for command in commands:
                stream.last_heard = time.monotonic()
                self._apply(session, stream, command)
        except InvalidRequest as error:
            session.end_stream(stream, error)
        except asyncio.CancelledError:
            raise
        except Exception:  # a command that breaks costs its stream, not the worker
            _log.exception("a command broke its stream")
            session.end_stream(stream, EngineFailure("a command could not be handled"))
        else:
            session.end_stream(stream, Unavailable("the router has left"))

    def _apply(
        self, session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand
    ) -> None:
        """Runs one command; an error of it becomes a SlotError. Raises on broken protocol."""
        kind = command.WhichOneof("body")
        if kind is None or kind == "beat":
            return
        router_slot: int = getattr(getattr(command, kind), "slot", 0)
        if kind in _OPENS_SLOT and router_slot in stream.slots:
            raise InvalidRequest("slot", router_slot, "is in use on this stream")
        try:
            _action(session, kind)(session, stream, command)
        except PacelineError as error:
            self._refuse(session, stream, router_slot, error)
        stream.flush(session.load_now())

    def _refuse(
        self, session: Session, stream: RouterStream, router_slot: int, error: PacelineError
    ) -> None:
        slot = stream.slots.get(router_slot)
        if slot is not None:
            session.end(slot, error)
            return
        stream.add_error(router_slot, error)
        stream.add_ended(router_slot)


def _action(session: Session, kind: str) -> Action:
    if kind not in _ACTIONS:
        raise EngineFailure(f"the command {kind} is not known")
    if not session.role.allows(kind):
        role = role_name(session.role.role)
        raise GivenUp(f"the command {kind} is not for a worker of the role {role}")
    return _ACTIONS[kind]
