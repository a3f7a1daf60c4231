"""The directory of sources against real servers of KvTransferService; the links are stand-ins."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.core.errors import IncompatiblePeer
from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer.base import Link
from paceline.rpc.channel import make_server
from paceline.v1 import common_pb2, kv_pb2, kv_pb2_grpc, worker_pb2
from paceline.worker.config import WorkerConfig
from paceline.worker.peers import PeerDirectory

SECRET = "a secret of the tests"
TICKET = common_pb2.Ticket(source_worker="source", source_incarnation="1")


class Source(kv_pb2_grpc.KvTransferServiceServicer):
    layout_digest = "01"

    async def Describe(self, request: Any, context: Any) -> kv_pb2.DescribeResponse:
        return kv_pb2.DescribeResponse(
            worker_id="source",
            incarnation="1",
            content_digest="ab",
            layout_digest=self.layout_digest,
        )


class FakeLink:
    transport = "fake"

    def close(self) -> None:
        pass


class FakeConnectors:
    group = PageGroup("full", 1, 1, 2)

    def connect(self, description: kv_pb2.DescribeResponse, timeout_s: float) -> Link:
        return FakeLink()  # type: ignore[return-value]


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
async def endpoint(source: Source) -> AsyncIterator[str]:
    server = make_server(SECRET.encode())
    kv_pb2_grpc.add_KvTransferServiceServicer_to_server(source, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.fixture
async def peers() -> AsyncIterator[PeerDirectory]:
    info = worker_pb2.WorkerInfo(worker_id="me", content_digest="ab", layout_digest="01")
    config = WorkerConfig(secret=SECRET, model="/")
    directory = PeerDirectory(config, info, FakeConnectors())  # type: ignore[arg-type]
    yield directory
    await directory.close()


async def test_a_late_report_of_an_old_peer_leaves_the_new_one(
    peers: PeerDirectory, endpoint: str
) -> None:
    """Two pulls share a peer whose link fails; the second hears of it after a new handshake."""
    old = await peers.get(TICKET, endpoint)
    assert await peers.get(TICKET, endpoint) is old
    peers.forget(old)
    new = await peers.get(TICKET, endpoint)
    assert new is not old
    peers.forget(old)
    assert await peers.get(TICKET, endpoint) is new


async def test_pages_of_another_layout_are_refused_by_name(
    peers: PeerDirectory, endpoint: str, source: Source
) -> None:
    source.layout_digest = "02"
    with pytest.raises(IncompatiblePeer) as refused:
        await peers.get(TICKET, endpoint)
    assert refused.value.field == "layout_digest"
