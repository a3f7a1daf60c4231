"""How a reader reaches a source: the best transport that works, not the best that is offered."""

import sys
import types
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.core.kv_layout import HeadRange
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import LocalPool, Source, TransportSettings
from paceline.kv_transfer.layout_map import WorkerLayout
from paceline.v1 import kv_pb2
from paceline.worker.connectors import Connectors, OwnPools
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


def of_layout(digest: str, **changed: object) -> kv_pb2.DescribeResponse:
    """A source whose pages are like SMALL's, but for what has changed."""
    group = {"name": "full", "num_layers": 2, "num_planes": 2, "num_heads": 3, "head_dim": 8}
    group |= {"dtype": "float32", "page_tokens": 16, **changed}
    return kv_pb2.DescribeResponse(
        layout_digest=digest,
        groups=[kv_pb2.PageGroup(**group)],  # type: ignore[arg-type]
        layers=[kv_pb2.LayerPlace(index=index) for index in range(2)],
        ranks=[kv_pb2.RankPages(num_heads=3)],
    )


def with_pools() -> Connectors:
    pool = make_pool(SMALL, 2)
    assert isinstance(pool, LocalPool)
    layout = WorkerLayout("full", ((0, 0), (0, 1)), (0,), 2, 2, 8, "float32", (HeadRange(0, 3),))
    own = OwnPools(layout, [pool], lambda name, into: registry.make_reader(name, into, SETTINGS))
    return Connectors(
        ["tcp"], SMALL, lambda name: registry.make_reader(name, pool, SETTINGS), [], (), own
    )


def test_layouts_that_are_alike_need_no_map() -> None:
    assert with_pools().plan(of_layout("ours", page_tokens=24), "ours") is None
    assert with_pools().plan(of_layout("other", page_tokens=32), "ours") is not None


def test_a_pool_on_a_device_takes_its_own_layout_only() -> None:
    assert connectors("tcp").plan(of_layout("ours"), "ours") is None
    with pytest.raises(IncompatiblePeer) as refused:
        connectors("tcp").plan(of_layout("other"), "ours")
    assert refused.value.field == "layout_digest"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"page_tokens": 24}, "page_tokens"),
        ({"num_heads": 2}, "ranks"),
        ({"head_dim": 16}, "head_dim"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"num_layers": 2**31}, "layers_per_page"),
        ({"window": 32}, "windows"),
    ],
)
def test_vllm_42895_a_source_that_cannot_be_paired_is_refused_by_name(
    changed: dict[str, object], field: str
) -> None:
    """https://github.com/vllm-project/vllm/issues/42895: page sizes were no part of the check."""
    with pytest.raises(IncompatiblePeer) as refused:
        with_pools().plan(of_layout("other", **changed), "ours")
    assert refused.value.field == field


@pytest.mark.parametrize("what", ["groups", "layers", "ranks"])
def test_a_description_without_a_layout_is_refused(what: str) -> None:
    made = of_layout("other")
    made.ClearField(what)  # type: ignore[arg-type]
    with pytest.raises(IncompatiblePeer) as refused:
        with_pools().plan(made, "ours")
    assert refused.value.field == what


def test_ranks_and_groups_that_differ_among_themselves_are_refused() -> None:
    made = of_layout("other")
    made.ranks.add(first_head=3, num_heads=1)
    with pytest.raises(IncompatiblePeer):
        with_pools().plan(made, "ours")
    made = of_layout("other")
    made.groups.add(name="full", num_layers=5)
    with pytest.raises(IncompatiblePeer):
        with_pools().plan(made, "ours")
    made = of_layout("other")
    made.ranks[0].first_page = 2**63
    with pytest.raises(IncompatiblePeer) as refused:
        with_pools().plan(made, "ours")
    assert refused.value.field == "first_page"
