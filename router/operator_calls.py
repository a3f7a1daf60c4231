"""What operators ask of a router about its workers: who is there, and roles for them."""

import asyncio
from collections.abc import AsyncGenerator

import grpc

from paceline.core.errors import InvalidRequest
from paceline.router.config import RouterConfig
from paceline.router.fleet import Fleet
from paceline.router.worker_session import WorkerSession
from paceline.rpc import caller_token, channel
from paceline.rpc.status import error_of
from paceline.v1 import control_pb2, worker_pb2, worker_pb2_grpc

MAX_NAMED = 16  # workers in an error


class OperatorCalls:
    def __init__(self, config: RouterConfig, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet

    def workers(self) -> list[control_pb2.KnownWorker]:
        """By name."""
        now = asyncio.get_running_loop().time()
        sessions = sorted(self._fleet.sessions(), key=lambda session: session.worker_id)
        return [
            control_pb2.KnownWorker(
                info=session.info,
                load=session.load,
                is_usable=session.is_usable(now, self._config.stale_after_s),
            )
            for session in sessions
        ]

    async def change_role(
        self, request: worker_pb2.ChangeRoleRequest
    ) -> AsyncGenerator[worker_pb2.RoleState]:
        """What the worker answers. Raises InvalidRequest for one that is not connected, and what
        the worker raises."""
        endpoint = self._session_of(request.worker_id).info.endpoint
        token = caller_token.metadata(self._config.secret.encode())
        async with channel.connect(endpoint, self._config.tls) as connection:
            stub = worker_pb2_grpc.WorkerServiceStub(connection)  # type: ignore[no-untyped-call]
            try:
                async for state in stub.ChangeRole(request, metadata=token):
                    yield state
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure) from None

    def _session_of(self, worker_id: str) -> WorkerSession:
        found = [s for s in self._fleet.sessions() if s.worker_id == worker_id]
        if found:
            return found[0]
        names = sorted(session.worker_id for session in self._fleet.sessions())
        shown = ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")
        known = f"connected are {shown}" if names else "no worker is connected"
        raise InvalidRequest("worker", worker_id, f"is not connected; {known}")
