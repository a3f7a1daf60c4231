"""Calls of operators to routers: the first of them that answers."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import grpc

from paceline.core.errors import ConfigError, InvalidRequest, PacelineError, Unavailable
from paceline.core.tls import TlsConfig
from paceline.gateway.router_addresses import Address, addresses_of
from paceline.rpc import caller_token, channel
from paceline.rpc.status import error_of
from paceline.v1 import control_pb2, control_pb2_grpc, worker_pb2

TIMEOUT_S = 5.0
ANSWER_S = 4.0  # of a worker, through one router


def check_routers(routers: Sequence[str]) -> None:
    """Raises ConfigError unless they are addresses."""
    ConfigError.check("router", routers, bool(routers), "must name one at least")
    for endpoint in routers:
        parts = re.fullmatch(r".+:(\d{1,5})", endpoint)
        is_one = parts is not None and int(parts[1]) < 65536
        ConfigError.check("router", endpoint, is_one, "must be host:port")


class RouterCalls:
    """`routers`: host:port, of each all addresses."""

    def __init__(self, routers: Sequence[str], secret: str, tls: TlsConfig) -> None:
        self._routers = routers
        self._secret = secret.encode()
        self._tls = tls

    async def workers(self) -> control_pb2.WorkersResponse:
        """Of one router. Raises what the last one answered, with its name, when none tells."""
        failure: PacelineError = Unavailable("no router was found")
        async for address in self._addresses():
            try:
                return await self.workers_of(address)
            except PacelineError as error:
                failure = of_router(address.endpoint, error)
        raise failure

    async def workers_of_all(self) -> list[control_pb2.WorkersResponse]:
        """Of those that answer."""
        addresses = []
        with suppress(PacelineError):  # none has an address
            addresses = [address async for address in self._addresses()]
        found = await asyncio.gather(*map(self._told_by, addresses))
        return [one for one in found if one is not None]

    async def _told_by(self, address: Address) -> control_pb2.WorkersResponse | None:
        try:
            return await self.workers_of(address)
        except PacelineError:
            return None

    async def known_workers(self) -> list[control_pb2.KnownWorker]:
        """That any router knows, each by the newest of its roles. Raises what the last router
        answered when none tells."""
        if not (told := await self.workers_of_all()):
            told = [await self.workers()]
        return newest(told)

    async def workers_of(self, address: Address) -> control_pb2.WorkersResponse:
        async with self._connect(address) as connection:
            try:
                response: control_pb2.WorkersResponse = await _stub(connection).Workers(
                    control_pb2.WorkersRequest(), metadata=self._token(), timeout=TIMEOUT_S
                )
                return response
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure) from None

    async def change_role(
        self, request: worker_pb2.ChangeRoleRequest
    ) -> AsyncIterator[worker_pb2.RoleState]:
        """Through a router that knows the worker. Raises what it, or the worker, answers."""
        failure: PacelineError = Unavailable("no router was found")
        async for address in self._addresses():
            try:
                async for state in self._change_by(address, request):
                    yield state
                return
            except Unavailable as error:  # the router, or the worker as it sees it
                failure = error
            except InvalidRequest as error:
                if error.field != "worker":
                    raise
                failure = error  # a router that has just started may not know it yet
        raise failure

    async def _change_by(
        self, address: Address, request: worker_pb2.ChangeRoleRequest
    ) -> AsyncIterator[worker_pb2.RoleState]:
        async with self._connect(address) as connection:
            call = _stub(connection).ChangeRole(request, metadata=self._token())
            try:
                state = await _first(call)
                while isinstance(state, worker_pb2.RoleState):
                    yield state
                    state = await call.read()
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure) from None
            finally:
                call.cancel()

    async def _addresses(self) -> AsyncIterator[Address]:
        """Of all routers. Raises Unavailable when none has one."""
        failure, num_found = Unavailable("no router was found"), 0
        for endpoint in self._routers:
            try:
                targets = await addresses_of(endpoint)
            except (OSError, UnicodeError) as error:
                failure = Unavailable(f"{endpoint} is no address: {error}")
                continue
            num_found += len(targets)
            for target in targets:
                yield Address(endpoint, target)
        if not num_found:
            raise failure

    def _connect(self, address: Address) -> grpc.aio.Channel:
        return channel.connect(address.target, self._tls, authority=address.endpoint)

    def _token(self) -> caller_token.Metadata:
        return caller_token.metadata(self._secret)


async def _first(call: grpc.aio.UnaryStreamCall[Any, Any]) -> worker_pb2.RoleState:
    """Later ones come when something has changed. Raises Unavailable."""
    try:
        async with asyncio.timeout(ANSWER_S):
            state = await call.read()
    except TimeoutError:
        raise Unavailable("the worker does not answer") from None
    if not isinstance(state, worker_pb2.RoleState):
        raise Unavailable("the worker ended the call early")
    return state


def of_router(name: str, error: PacelineError) -> PacelineError:
    """For an operator, who may have named several."""
    return type(error).relayed(f"router {name}: {error.message}", field=error.field)


def newest(told: Sequence[control_pb2.WorkersResponse]) -> list[control_pb2.KnownWorker]:
    """By name; each as one tells of it that may use it, and has the latest news of its role."""
    known: dict[str, control_pb2.KnownWorker] = {}
    for worker in (worker for one in told for worker in one.workers):
        other = known.setdefault(worker.info.worker_id, worker)
        if _rank(worker) > _rank(other):
            known[worker.info.worker_id] = worker
    return [known[name] for name in sorted(known)]


def _rank(worker: control_pb2.KnownWorker) -> tuple[bool, int]:
    return worker.is_usable, worker.info.role_version


def _stub(connection: grpc.aio.Channel) -> control_pb2_grpc.RouterServiceStub:
    return control_pb2_grpc.RouterServiceStub(connection)  # type: ignore[no-untyped-call]
