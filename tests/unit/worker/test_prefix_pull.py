"""What becomes of a request while its prefix is pulled from another worker."""

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import KvMismatch, KvUnavailable, Overloaded, PacelineError, PeerGone
from paceline.core.kv_layout import PageGroup
from paceline.engine.messages import Fill, Filled, GrantedRun, Pulled, TransferClosed
from paceline.kv_transfer.base import CellSums, Piece
from paceline.kv_transfer.link_statistics import LinkFigures, LinkStatistics
from paceline.v1 import kv_pb2, worker_pb2
from paceline.worker.page_fill import PageFill, Tell, Wanted
from paceline.worker.prefix_offers import Offer
from paceline.worker.prefix_pull import PrefixPull
from paceline.worker.pull_choice import Outcome, Price
from paceline.worker.pull_threads import PullThreads
from tests.support.waits import until

GROUP = PageGroup("full", 1, 1, 2)
SUM = 9  # of every page


class Peer:
    """Holds the first `num_held` blocks of whatever is asked for; reads wait for `may_read`."""

    transport = "fake"
    key = ("holder", "s1")

    def __init__(self, num_held: int = 4) -> None:
        self.num_held = num_held
        self.link = self
        self.uneven = None
        self.statistics = LinkStatistics(GROUP)
        self.turns = asyncio.Semaphore(2)
        self.beats = SimpleNamespace(
            hold=lambda _: None, drop=lambda _: None, is_lost=lambda _: False
        )
        self.is_reading = threading.Event()
        self.may_read = threading.Event()
        self.may_pin = asyncio.Event()
        self.may_read.set()
        self.may_pin.set()
        self.failure: PacelineError | None = None  # of a pin
        self.read_failure: PacelineError | None = None
        self.pins: list[kv_pb2.PinRequest] = []
        self.unpinned: list[str] = []

    async def pin(self, request: kv_pb2.PinRequest) -> kv_pb2.PinResponse:
        self.pins.append(request)
        await self.may_pin.wait()
        if self.failure is not None:
            raise self.failure
        (run,) = request.runs
        count = min(len(run.keys) // 32, self.num_held)
        self.num_held -= count
        pages = [kv_pb2.PageRef(page=i, generation=1, checksums=[SUM]) for i in range(count)]
        return kv_pb2.PinResponse(lease_id="lease", runs=[kv_pb2.PageRun(pages=pages)])

    async def unpin(self, request: kv_pb2.UnpinRequest) -> None:
        self.unpinned.append(request.lease_id)

    async def report(self, request: kv_pb2.ReportRequest) -> None:
        pass

    def take_figures(self) -> LinkFigures:
        return self.statistics.figures

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        self.is_reading.set()
        assert self.may_read.wait(10)
        if self.read_failure is not None:
            raise self.read_failure
        return np.full((len(piece.source_pages), 1), SUM, np.uint64)


class Rig:
    """A slot of 100 tokens, four blocks of which were offered and are to be filled."""

    def __init__(
        self,
        peer: Peer,
        compute_s: float = 5.0,
        connect_s: float = 0.0,
        before: Sequence["Origin"] = (),
    ) -> None:
        async def get(ticket: object, endpoint: str) -> Peer:
            await asyncio.sleep(connect_s)
            return peer

        self.sent: list[Any] = []
        self.outcomes: list[tuple[Outcome, int, int]] = []
        self.learned: list[tuple[float, int]] = []  # seconds, pages
        self.threads = PullThreads(2)
        offers = SimpleNamespace(
            pulled=lambda offer, *counts: self.outcomes.append(counts),
            learn=lambda offer, outcome, *figures: self.learned.append(figures),
        )
        self.tasks: list[asyncio.Task[object]] = []
        session: Any = SimpleNamespace(
            send=self.sent.append,
            fills=set(),
            peers=SimpleNamespace(get=get, forget=lambda peer: None),
            pull_threads=self.threads,
            connectors=SimpleNamespace(group=GROUP),
            metrics=SimpleNamespace(pulled=lambda peer: None),
            prefix_offers=offers,
            background=lambda call, message: self.tasks.append(asyncio.create_task(call(message))),
        )
        request = SimpleNamespace(root_key=bytes(32), token_ids=list(range(100)))
        slot: Any = SimpleNamespace(number=5, request=request, keys=[], trace=None)
        offer = Offer(worker_pb2.PrefixHint(), 5, 4, Price(0.0, compute_s))
        fill = Fill(5, [GrantedRun(1, [11, 12, 13, 14])])
        origin = PrefixPull(session, slot, offer, fill.runs)
        self.fill = PageFill(session, slot, fill, [*before, origin])

    async def finished(self) -> list[Any]:
        await asyncio.wait_for(self.fill.finished(), 5)
        await asyncio.gather(*self.tasks)
        self.threads.close()
        return self.sent


def pulled(*blocks: int) -> Pulled:
    return Pulled(5, 0, blocks[0], [[SUM]] * len(blocks))


async def test_all_that_was_offered_comes() -> None:
    peer = Peer()
    rig = Rig(peer)
    assert await rig.finished() == [pulled(1, 2, 3, 4), Filled(5)]
    assert rig.outcomes == [(Outcome.PULLED, 4, 4)]
    assert [num_pages for _, num_pages in rig.learned] == [4]
    assert peer.unpinned == ["lease"]


async def test_connecting_is_no_part_of_the_latency_of_a_link() -> None:
    rig = Rig(Peer(), connect_s=1.0)
    await rig.finished()
    ((took_s, _),) = rig.learned
    assert took_s < 0.8, "without the second that connecting took"


@pytest.mark.parametrize("num_held", [0, 3])
async def test_what_the_source_lacks_is_computed(num_held: int) -> None:
    peer = Peer(num_held)
    rig = Rig(peer)
    came = [pulled(*range(1, 1 + num_held))] if num_held else []
    assert await rig.finished() == [*came, Filled(5)]
    assert rig.outcomes == [(Outcome.MISSING, 4, num_held)]
    assert peer.unpinned == ["lease"]


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (Overloaded("pins are taken"), Outcome.REFUSED),
        (KvUnavailable("another incarnation"), Outcome.MISSING),
        (PeerGone("dead"), Outcome.FAILED),
    ],
)
async def test_a_failed_pull_is_a_miss(failure: PacelineError, outcome: Outcome) -> None:
    peer = Peer()
    peer.failure = failure
    rig = Rig(peer)
    assert await rig.finished() == [Filled(5)]
    assert rig.outcomes == [(outcome, 4, 0)]


@pytest.mark.parametrize("failure", [KvMismatch("wrong bytes"), PeerGone("dead")])
async def test_a_failed_read_is_a_miss(failure: PacelineError) -> None:
    peer = Peer()
    peer.read_failure = failure
    rig = Rig(peer)
    assert await rig.finished() == [Filled(5)]
    assert rig.outcomes == [(Outcome.FAILED, 4, 0)]
    assert peer.unpinned == ["lease"]


async def test_a_source_that_does_not_answer_costs_what_computing_takes() -> None:
    peer = Peer()
    peer.may_pin.clear()
    rig = Rig(peer, compute_s=0.05)
    assert await rig.finished() == [Filled(5)]
    assert rig.outcomes == [(Outcome.LATE, 4, 0)]


async def test_a_late_copy_keeps_its_pages_and_not_its_request() -> None:
    peer = Peer()
    peer.may_read.clear()
    rig = Rig(peer, compute_s=0.05)
    await until(lambda: bool(rig.sent))
    assert rig.sent == [Filled(5, is_copying=True)]
    assert rig.outcomes == [(Outcome.LATE, 4, 0)]
    assert not peer.unpinned, "it is still being read"
    peer.may_read.set()
    assert await rig.finished() == [Filled(5, is_copying=True), TransferClosed(5)]
    assert peer.unpinned == ["lease"]


async def test_a_slot_that_ends_while_a_late_copy_goes_on_is_closed_once() -> None:
    peer = Peer()
    peer.may_read.clear()
    rig = Rig(peer, compute_s=0.05)
    await until(lambda: bool(rig.sent))
    assert rig.fill.stop()
    peer.may_read.set()
    assert await rig.finished() == [Filled(5, is_copying=True), TransferClosed(5)]
    assert not rig.fill.stop()


async def test_a_slot_that_ends_during_a_copy_waits_for_it() -> None:
    peer = Peer()
    peer.may_read.clear()
    rig = Rig(peer)
    await until(peer.is_reading.is_set)
    assert rig.fill.stop()
    await asyncio.sleep(0.02)
    assert not rig.sent
    peer.may_read.set()
    assert await rig.finished() == [TransferClosed(5)]
    assert not rig.outcomes and peer.unpinned == ["lease"]


async def test_a_slot_that_ends_before_its_copy_ends_the_pull_at_once() -> None:
    peer = Peer()
    peer.may_pin.clear()
    rig = Rig(peer)
    await until(lambda: bool(peer.pins))
    assert rig.fill.stop()
    assert await rig.finished() == [TransferClosed(5)]
    assert not peer.is_reading.is_set() and not rig.outcomes


async def test_long_prefixes_are_pinned_in_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.worker.prefix_pull.MAX_RANGE_BLOCKS", 3)
    peer = Peer()
    rig = Rig(peer)
    assert await rig.finished() == [pulled(1, 2, 3), pulled(4), Filled(5)]
    assert [len(pin.runs[0].keys) for pin in peer.pins] == [96, 32]


class Origin:
    """Gives some blocks, at once."""

    is_copying = False

    def __init__(self, *blocks: int) -> None:
        self.blocks = blocks
        self.asked: list[int] = []

    async def pull(self, wanted: Sequence[Wanted], tell: Tell) -> None:
        self.asked = [one.block for one in wanted]
        for block in self.blocks:
            tell(pulled(block))

    def stop(self) -> None:
        pass

    async def finished(self) -> None:
        pass


@pytest.mark.parametrize(("own", "asked"), [((1, 3), [2, 4]), ((), [1, 2, 3, 4])])
async def test_others_are_asked_for_what_the_own_tiers_lack(
    own: tuple[int, ...], asked: list[int]
) -> None:
    sent: list[Any] = []
    session: Any = SimpleNamespace(send=sent.append, fills=set())
    slot: Any = SimpleNamespace(number=5)
    tiers, other = Origin(*own), Origin(*asked)
    origins = [tiers, other, third := Origin()]
    fill = PageFill(session, slot, Fill(5, [GrantedRun(1, [11, 12, 13, 14])]), origins)
    await fill.finished()
    assert (tiers.asked, other.asked, third.asked) == ([1, 2, 3, 4], asked, [])
    assert sent == [*map(pulled, (*own, *asked)), Filled(5)]


async def test_what_tiers_have_left_is_pinned_run_by_run() -> None:
    """A source takes one run of each page group at once."""
    peer = Peer()
    rig = Rig(peer, before=[Origin(2)])
    assert await rig.finished() == [pulled(2), pulled(1), pulled(3, 4), Filled(5)]
    assert [len(pin.runs) for pin in peer.pins] == [1, 1]
    assert rig.outcomes == [(Outcome.PULLED, 3, 3)]
