"""Calls of operators to routers: the first of them that answers."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import grpc

from paceline.core.errors import ConfigError, PacelineError, Unavailable
from paceline.core.tls import TlsConfig
from paceline.gateway.router_addresses import Address, addresses_of
from paceline.rpc import caller_token, channel
from paceline.rpc.status import error_of
from paceline.v1 import control_pb2, control_pb2_grpc, worker_pb2

TIMEOUT_S = 5.0


def check_routers(routers: Sequence[str]) -> None:
    """Raises ConfigError unless they are addresses."""
    ConfigError.check("router", routers, bool(routers), "must name one at least")
    for endpoint in routers:
        is_one = re.fullmatch(r".+:\d{1,5}", endpoint) is not None
        ConfigError.check("router", endpoint, is_one, "must be host:port")


class RouterCalls:
    """`routers`: host:port, of each all addresses."""

    def __init__(self, routers: Sequence[str], secret: str, tls: TlsConfig) -> None:
        self._routers = routers
        self._secret = secret.encode()
        self._tls = tls

    async def workers(self) -> control_pb2.WorkersResponse:
        """Of one router. Raises what the last one answered when none tells."""
        failure: PacelineError = Unavailable("no router was found")
        async for address in self._addresses():
            try:
                return await self.workers_of(address)
            except PacelineError as error:
                failure = error
        raise failure

    async def workers_of_all(self) -> list[control_pb2.WorkersResponse]:
        """Of those that answer."""
        found = []
        with suppress(PacelineError):  # none has an address
            async for address in self._addresses():
                with suppress(PacelineError):
                    found.append(await self.workers_of(address))
        return found

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
        raise failure

    async def _change_by(
        self, address: Address, request: worker_pb2.ChangeRoleRequest
    ) -> AsyncIterator[worker_pb2.RoleState]:
        async with self._connect(address) as connection:
            call = _stub(connection).ChangeRole(request, metadata=self._token())
            try:
                async for state in call:
                    yield state
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


def _stub(connection: grpc.aio.Channel) -> control_pb2_grpc.RouterServiceStub:
    return control_pb2_grpc.RouterServiceStub(connection)  # type: ignore[no-untyped-call]
