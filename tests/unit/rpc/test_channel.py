"""Channels over links that are late: what a lost packet costs, no call pays for with its life."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.core.tls import PLAIN
from paceline.rpc.channel import connect, connect_blocking, listen, make_server
from paceline.v1 import kv_pb2, kv_pb2_grpc
from tests.support.tcp_proxy import TcpProxy
from tests.support.waits import until

RETRANSMIT_S = 1.1  # TCP's, of the first packet of a connection


class Kv(kv_pb2_grpc.KvTransferServiceServicer):
    async def Describe(self, request: Any, context: Any) -> kv_pb2.DescribeResponse:
        return kv_pb2.DescribeResponse(worker_id="source")


@pytest.fixture
async def link() -> AsyncIterator[TcpProxy]:
    """To a server; nothing gets through yet."""
    server = make_server()
    kv_pb2_grpc.add_KvTransferServiceServicer_to_server(Kv(), server)  # type: ignore[no-untyped-call]
    port = listen(server, "127.0.0.1:0", PLAIN)
    await server.start()
    proxy = TcpProxy(("127.0.0.1", port))
    proxy.pause()
    yield proxy
    await asyncio.to_thread(proxy.close)
    await server.stop(None)


async def let_through_late(link: TcpProxy) -> None:
    await until(lambda: link.num_accepted)
    await asyncio.sleep(RETRANSMIT_S)
    link.resume()


async def test_a_lost_first_packet_fails_no_call(link: TcpProxy) -> None:
    async with connect(f"127.0.0.1:{link.port}") as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Describe(kv_pb2.DescribeRequest(), timeout=20)
        await let_through_late(link)
        assert (await call).worker_id == "source"


async def test_nor_one_of_a_thread(link: TcpProxy) -> None:
    with connect_blocking(f"127.0.0.1:{link.port}") as channel:
        stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Describe.future(kv_pb2.DescribeRequest(), timeout=20)
        await let_through_late(link)
        assert (await asyncio.to_thread(call.result)).worker_id == "source"
