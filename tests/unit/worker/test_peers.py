"""The directory of sources against real servers of KvTransferService; the links are stand-ins."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from paceline.core.errors import (
    IncompatiblePeer,
    KvUnavailable,
    PacelineError,
    PeerGone,
    Unavailable,
)
from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer.link_statistics import LinkStatistics
from paceline.rpc.channel import make_server
from paceline.v1 import common_pb2, kv_pb2, kv_pb2_grpc, worker_pb2
from paceline.worker.config import WorkerConfig
from paceline.worker.connectors import Reached
from paceline.worker.lease_beats import LeaseBeats
from paceline.worker.peers import PIN_TIMEOUT_S, PeerDirectory
from paceline.worker.quarantine import STRIKES, Verdict
from tests.support.waits import until

SECRET = "a secret of the tests"
KEY = ("source", "1")
TICKET = common_pb2.Ticket(source_worker="source", source_incarnation="1")
OTHER = common_pb2.Ticket(source_worker="source", source_incarnation="2")


class Source(kv_pb2_grpc.KvTransferServiceServicer):
    incarnation = "1"
    refuses_others = True
    layout_digest = "01"
    verdict: kv_pb2.ReportResponse | None = None

    content_digest = "ab"

    async def Describe(self, request: Any, context: Any) -> kv_pb2.DescribeResponse:
        if self.refuses_others and request.source_incarnation != self.incarnation:
            raise KvUnavailable("another incarnation", field="source_incarnation")
        if request.content_digest != self.content_digest:
            raise IncompatiblePeer("of another model", field="content_digest")
        return kv_pb2.DescribeResponse(
            worker_id="source",
            incarnation=self.incarnation,
            content_digest="ab",
            layout_digest=self.layout_digest,
        )

    async def Pin(self, request: Any, context: Any) -> kv_pb2.PinResponse:
        await asyncio.sleep(10)
        return kv_pb2.PinResponse()

    async def Report(self, request: Any, context: Any) -> kv_pb2.ReportResponse:
        if self.verdict is None:
            await asyncio.sleep(10)
        assert self.verdict is not None
        return self.verdict


class FakeLink:
    transport = "fake"
    lost = ()

    def close(self) -> None:
        pass


class FakeConnectors:
    group = PageGroup("full", 1, 1, 2)

    def plan(self, description: kv_pb2.DescribeResponse, layout_digest: str) -> None:
        if description.layout_digest != layout_digest:
            raise IncompatiblePeer("of another layout", field="layout_digest")

    def reach(self, *description: object) -> Reached:
        return Reached(FakeLink(), LinkStatistics(self.group))  # type: ignore[arg-type]


class FakeChecks:
    """Of links that are as they should be."""

    def __init__(self) -> None:
        self.apart: dict[tuple[str, str], str] = {}
        self.num_admitted = 0
        self.failure: PacelineError | None = None

    def is_apart(self, key: tuple[str, str]) -> bool:
        return key in self.apart

    def refuse_apart(self, key: object) -> None:
        pass

    def forget_gone(self) -> None:
        pass

    def keep_apart(self, key: tuple[str, str], error: IncompatiblePeer) -> None:
        self.apart[key] = error.message

    async def admit(self, *link: object, again: bool = False) -> None:
        self.num_admitted += 1
        if again and self.failure is not None:
            raise self.failure

    async def self_test(self, *link: object) -> None:
        pass


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
    directory = PeerDirectory(config, info, FakeConnectors(), FakeChecks(), {})  # type: ignore[arg-type]
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


async def test_who_waits_for_an_incarnation_hears_that_another_took_its_place(
    peers: PeerDirectory, endpoint: str, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted = []

    async def admit_never(key: tuple[str, str], *link: object, again: bool) -> None:
        admitted.append(key)
        await asyncio.sleep(10)

    monkeypatch.setattr(peers.checks, "admit", admit_never)
    waiting = asyncio.create_task(peers.get(TICKET, endpoint))
    await until(lambda: admitted)
    source.incarnation = "2"
    again = asyncio.create_task(peers.get(OTHER, endpoint))
    with pytest.raises(PeerGone, match="another incarnation"):
        await waiting
    again.cancel()


async def test_a_ticket_of_an_incarnation_that_is_gone_leaves_the_link_to_its_successor(
    peers: PeerDirectory, endpoint: str, source: Source
) -> None:
    """Hints are of names, and may be old: pulls from the successor go on."""
    peer = await peers.get(TICKET, endpoint)
    source.refuses_others = False  # as workers of former versions
    with pytest.raises(PeerGone, match="another worker or incarnation"):
        await peers.get(OTHER, endpoint)
    assert await peers.get(TICKET, endpoint) is peer
    assert peers.connected() == [peer]


async def test_sources_that_do_not_let_us_connect_hold_up_no_other_threads(
    peers: PeerDirectory, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall lets calls through and drops pages: keys are hashed all the same."""
    waits, may_go_on = threading.Event(), threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))

    def reach(*description: object) -> Reached:
        waits.set()
        may_go_on.wait(20)
        raise PeerGone("no transport reaches the source")

    monkeypatch.setattr(peers._connectors, "reach", reach)
    meeting = asyncio.create_task(peers.get(TICKET, endpoint))
    await until(waits.is_set)
    assert await asyncio.wait_for(asyncio.to_thread(int, 3), 5) == 3
    may_go_on.set()
    with pytest.raises(PeerGone):
        await meeting


async def test_a_successor_with_another_model_keeps_nobody_apart(
    peers: PeerDirectory, endpoint: str, source: Source
) -> None:
    """A rolling update at the same address, and a hint of before."""
    source.incarnation, source.content_digest = "2", "cd"
    with pytest.raises(PeerGone, match="another incarnation"):
        await peers.get(TICKET, endpoint)
    assert not peers.checks.apart
    with pytest.raises(IncompatiblePeer):
        await peers.get(OTHER, endpoint)
    assert list(peers.checks.apart) == [("source", "2")]


async def test_a_successor_takes_the_place_of_an_incarnation(
    peers: PeerDirectory, endpoint: str, source: Source
) -> None:
    await peers.get(TICKET, endpoint)
    source.incarnation = "2"
    peer = await peers.get(OTHER, endpoint)
    assert peers.connected() == [peer]


async def test_a_try_that_failed_while_nobody_waited_is_not_held_against_the_source(
    peers: PeerDirectory, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pull that is late goes away before its source is found to be silent."""
    may_fail = asyncio.Event()

    async def admit_not(*link: object, again: bool) -> None:
        await may_fail.wait()
        raise PeerGone("the source is silent")

    with monkeypatch.context() as patched:
        patched.setattr(peers.checks, "admit", admit_not)
        waiting = asyncio.create_task(peers.get(TICKET, endpoint))
        await until(lambda: peers.knows(KEY))
        waiting.cancel()
        may_fail.set()
        await until(lambda: not peers.knows(KEY))
    assert (await peers.get(TICKET, endpoint)).key == KEY


async def test_calls_over_a_link_that_is_closed_find_the_peer_gone(
    peers: PeerDirectory, endpoint: str
) -> None:
    """Another pull may have found the link broken while this one waited for its turn."""
    peer = await peers.get(TICKET, endpoint)
    await peer.close()
    with pytest.raises(PeerGone):
        await peer.pin(kv_pb2.PinRequest())
    with pytest.raises(PeerGone):
        await peer.unpin(kv_pb2.UnpinRequest())
    with pytest.raises(PeerGone):
        peer.progress(TICKET, ())


async def test_pages_that_cannot_be_ours_are_refused_by_name(
    peers: PeerDirectory, endpoint: str, source: Source
) -> None:
    source.layout_digest = "02"
    with pytest.raises(IncompatiblePeer) as refused:
        await peers.get(TICKET, endpoint)
    assert refused.value.field == "layout_digest"
    assert peers.details() == ["kept apart from source: of another layout"]


async def test_a_source_whose_bytes_were_wrong_is_left_for_a_while(
    peers: PeerDirectory, endpoint: str
) -> None:
    peer = await peers.get(TICKET, endpoint)
    for _ in range(STRIKES):
        assert peer in peers.connected()
        peers.judge(peer, Verdict.SOURCE)
    assert peers.connected() == []
    assert peers.details() == ["in quarantine: source"]
    with pytest.raises(KvUnavailable, match="quarantine"):
        await peers.get(TICKET, endpoint)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (kv_pb2.ReportResponse(dropped=True, known=True), Verdict.SOURCE),
        (kv_pb2.ReportResponse(known=True), Verdict.LINK),
        (kv_pb2.ReportResponse(), Verdict.GONE),
        (None, Verdict.SILENT),
    ],
)
async def test_what_a_source_says_of_a_wrong_page(
    peers: PeerDirectory,
    endpoint: str,
    source: Source,
    answer: kv_pb2.ReportResponse | None,
    verdict: Verdict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.worker.peers.CALL_TIMEOUT_S", 0.3)
    source.verdict = answer
    peer = await peers.get(TICKET, endpoint)
    assert await peer.report(kv_pb2.ReportRequest(page=3, generation=1)) is verdict


@pytest.mark.parametrize(
    ("failure", "stays"), [(None, True), (IncompatiblePeer("drifted"), False), (PeerGone(""), True)]
)
async def test_canaries_are_looked_at_again_and_drift_keeps_apart(
    peers: PeerDirectory, endpoint: str, failure: PacelineError | None, stays: bool
) -> None:
    checks: Any = peers.checks
    peer = await peers.get(TICKET, endpoint)
    peers.sweep()
    await asyncio.sleep(0.05)
    assert checks.num_admitted == 1, "it is not time yet"
    checks.failure = failure
    peer.compared -= 1000
    peers.sweep()
    peers.sweep()
    await asyncio.sleep(0.05)
    assert checks.num_admitted == 2
    assert (peer in peers.connected()) is stays
    assert bool(checks.apart) is not stays


async def test_the_canary_of_a_silent_source_waits_until_it_is_heard_again(
    peers: PeerDirectory, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: Any = peers.checks
    peer = await peers.get(TICKET, endpoint)
    peer.compared -= 1000
    with monkeypatch.context() as silent:
        silent.setattr(LeaseBeats, "unanswered_s", 7.0)
        peers.sweep()
        await asyncio.sleep(0.05)
        assert checks.num_admitted == 1
    peers.sweep()
    await asyncio.sleep(0.05)
    assert checks.num_admitted == 2


async def test_a_source_that_does_not_answer_a_pin_is_given_up_soon(
    peers: PeerDirectory, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a link that was cut: the request goes on elsewhere, within three seconds in all."""
    assert PIN_TIMEOUT_S + 0.5 < 3
    monkeypatch.setattr("paceline.worker.peers.PIN_TIMEOUT_S", 0.2)
    peer = await peers.get(TICKET, endpoint)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(peer.pin(kv_pb2.PinRequest(ticket=TICKET)), 2)
