"""How a reader reaches a source: the best transport that works, not the best that is offered."""

import sys
import types
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import Source, TransportSettings
from paceline.v1 import kv_pb2
from paceline.worker.connectors import Connectors
from tests.contract.pools import SMALL, make_pool

SETTINGS = TransportSettings("incarnation-1")


class GoneReader:
    def connect(self, address: bytes, timeout_s: float) -> None:
        raise PeerGone("closed without a word")  # so does shm to a reader of another user


@pytest.fixture(autouse=True)
def shut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport that is offered and looks fine, yet does not connect."""
    module = types.ModuleType("shut")
    module.make_reader = lambda pool, settings: GoneReader()  # type: ignore[attr-defined]
    module.why_unreachable = lambda address: ""  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shut", module)
    shut = registry.Entry("shut")
    monkeypatch.setattr(registry, "_entries", {"shut": shut, **registry._entries})


@pytest.fixture
def tcp() -> Iterator[Source]:
    source = registry.make_source("tcp", make_pool(SMALL, 1), SETTINGS)
    source.start()
    yield source
    source.close()


def description(**offered: bytes) -> kv_pb2.DescribeResponse:
    transports = [kv_pb2.TransportAddress(name=n, address=a) for n, a in offered.items()]
    return kv_pb2.DescribeResponse(worker_id="source", transports=transports)


def connectors(*transports: str) -> Connectors:
    names = registry.names_of(transports)
    pool = make_pool(SMALL, 1)
    return Connectors(names, SMALL, lambda name: registry.make_reader(name, pool, SETTINGS), [])


@pytest.mark.parametrize("transports", [("auto",), ("shut", "tcp")])
def test_a_transport_that_fails_is_followed_by_the_next(
    tcp: Source, transports: tuple[str, ...]
) -> None:
    offered = description(shut=b"", tcp=tcp.address())
    with capture_logs() as logs:
        link = connectors(*transports).connect(offered, 3.0)
    assert link.transport == "tcp"
    link.close()
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert (warning["name"], warning["source"]) == ("shut", "source")


def test_when_all_fail_each_reason_is_given(tcp: Source) -> None:
    with pytest.raises(PeerGone, match="shut: closed without a word; tcp: the source offers only"):
        connectors("shut", "tcp").connect(description(shut=b""), 3.0)
    with pytest.raises(IncompatiblePeer, match="shm: the source offers only tcp") as refused:
        connectors("shm").connect(description(tcp=tcp.address()), 3.0)
    assert refused.value.field == "transport"
