"""What a reader makes of the errors of its source, and what it leaves to others when it ends."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import (
    Cancelled,
    EngineFailure,
    InvalidRequest,
    KvUnavailable,
    Overloaded,
    PacelineError,
    PeerGone,
)
from paceline.core.kv_layout import PageGroup
from paceline.core.sampling import SamplingParams
from paceline.engine.messages import (
    Adopt,
    Ended,
    GrantedRun,
    Load,
    Pulled,
    RequestSpec,
    Reserved,
    StepOutput,
    TransferClosed,
)
from paceline.kv_transfer.base import CellSums, Piece
from paceline.kv_transfer.link_statistics import LinkFigures, LinkStatistics
from paceline.rpc.convert import error_to_proto
from paceline.v1 import common_pb2, kv_pb2, worker_pb2
from paceline.worker.adoption import Adoption
from paceline.worker.config import WorkerConfig
from paceline.worker.metrics import WorkerMetrics
from paceline.worker.role import WorkerRole
from paceline.worker.router_stream import RouterStream
from paceline.worker.session import Session


class Progress:
    """A call that ends with the last of `events`."""

    def __init__(self, *events: kv_pb2.ProgressEvent) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[kv_pb2.ProgressEvent]:
        for event in self._events:
            yield event

    def cancel(self) -> None:
        pass


async def end_of(failure: PacelineError) -> PacelineError:
    """How the reader's slot ends."""
    ends: list[PacelineError] = []
    failed = kv_pb2.ProgressEvent(error=error_to_proto(failure))

    async def get(ticket: object, endpoint: str) -> Any:
        return SimpleNamespace(progress=lambda *_: Progress(failed))

    session: Any = SimpleNamespace(
        adoptions=set(),
        peers=SimpleNamespace(get=get),
        metrics=WorkerMetrics("m", "decode"),
        end=lambda slot, error: ends.append(error),
    )
    request = SimpleNamespace(root_key=bytes(32), token_ids=[1, 2, 3])
    slot: Any = SimpleNamespace(request=request, reserved=Reserved(1, 0, [GrantedRun(0, [5])]))
    await Adoption(session, slot, common_pb2.Ticket(), "source:1").finished()
    (end,) = ends
    return end


@pytest.mark.parametrize("failure", [EngineFailure("a bug"), Cancelled("has ended")])
async def test_when_the_source_fails_the_router_plans_again(failure: PacelineError) -> None:
    end = await end_of(failure)
    assert isinstance(end, KvUnavailable) and failure.message in end.message


@pytest.mark.parametrize("failure", [InvalidRequest("n", 7, "too much"), Overloaded("pins")])
async def test_what_is_no_fault_of_the_source_keeps_its_kind(failure: PacelineError) -> None:
    end = await end_of(failure)
    assert (type(end), end.message, end.field) == (type(failure), failure.message, failure.field)


class Source:
    """A peer with one block of 16 tokens; the copy of it goes on until `may_end`."""

    def __init__(self, *events: kv_pb2.ProgressEvent) -> None:
        self.events = events
        self.link = self
        self.uneven = None
        self.statistics = LinkStatistics(PageGroup("full", 1, 1, 2))
        self.turns = asyncio.Semaphore(4)
        self.beats = SimpleNamespace(
            hold=lambda _: None, drop=lambda _: None, is_lost=lambda _: False
        )
        self.is_copying = threading.Event()
        self.may_end = threading.Event()
        self.failure: Exception | None = None
        self.num_pins = 0
        self.unpinned: list[kv_pb2.UnpinRequest] = []
        self.pages_read: list[int] = []

    transport = "fake"
    key = ("prefill-0", "incarnation")

    def progress(self, ticket: object, first_blocks: object) -> "Progress":
        return Progress(*self.events)

    async def pin(self, request: object) -> kv_pb2.PinResponse:
        self.num_pins += 1
        return kv_pb2.PinResponse(
            runs=[kv_pb2.PageRun(pages=[kv_pb2.PageRef(page=3, generation=1, checksums=[9])])]
        )

    async def unpin(self, request: kv_pb2.UnpinRequest) -> None:
        self.unpinned.append(request)

    def take_figures(self) -> LinkFigures:
        return self.statistics.figures

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        self.is_copying.set()
        self.pages_read += piece.source_pages.tolist()
        assert self.may_end.wait(10)
        if self.failure is not None:
            raise self.failure
        return np.array([[9]], np.uint64)


class Rank:
    """Remembers what it was sent, and how much of that before it was closed."""

    def __init__(self) -> None:
        self.ready = SimpleNamespace(num_pages=8, canary=None, content_parts={})
        self.program = SimpleNamespace(pid=os.getpid())
        self.sent: list[object] = []
        self.link = SimpleNamespace(send=self.sent.append, call=None, last_step_unix_us=1)
        self.num_sent_before_close: int | None = None

    async def stop(self) -> None:
        pass

    async def close(self) -> None:
        self.num_sent_before_close = len(self.sent)


class Rig:
    """A session whose only peer is `source`, and a slot that adopts 16 tokens from it."""

    def __init__(self, source: Source) -> None:
        async def get(ticket: object, endpoint: str) -> Source:
            return source

        async def close() -> None:
            pass

        rank: Any = Rank()
        self.rank: Rank = rank
        self.forgotten: list[object] = []
        connectors: Any = SimpleNamespace(close=lambda: None, group=PageGroup("full", 1, 1, 2))
        config = WorkerConfig(secret="a secret of the tests", model="/")
        info = worker_pb2.WorkerInfo(vocab_size=100)
        metrics, role = WorkerMetrics("m", "decode"), WorkerRole(worker_pb2.ROLE_DECODE, 1.0)
        self.session = Session(config, rank, info, connectors, metrics, print, role)
        peers: Any = SimpleNamespace(get=get, forget=self.forgotten.append, close=close)
        self.session.peers = peers
        request = RequestSpec("r", list(range(16)), 16, bytes(32), SamplingParams(), (0,))
        self.slot = self.session.slots.open(RouterStream(), 7, request)
        self.slot.is_reservation = True
        self.slot.reserved = Reserved(self.slot.number, 0, [GrantedRun(0, [5])])
        self.adoption = Adoption(self.session, self.slot, common_pb2.Ticket(), "source:1")
        self.slot.adoption = self.adoption


RECORD = kv_pb2.ProgressEvent(
    record=kv_pb2.HandoffRecord(
        num_prompt_tokens=16, num_tokens=16, first_tokens=[kv_pb2.FirstToken(token_id=4)]
    )
)


def record_with_rest(num_pages: int, first_page: int = 3) -> kv_pb2.ProgressEvent:
    pages = [
        kv_pb2.PageRef(page=first_page + i, generation=1, checksums=[9]) for i in range(num_pages)
    ]
    rest = kv_pb2.PinResponse(lease_id="rest", runs=[kv_pb2.PageRun(pages=pages)])
    return kv_pb2.ProgressEvent(record=RECORD.record, rest=rest)


@pytest.mark.parametrize("num_pages", [1, 2])  # 2: pinned before the reader had the first
async def test_what_came_pinned_with_the_record_needs_no_pin(num_pages: int) -> None:
    source = Source(record_with_rest(num_pages))
    source.may_end.set()
    rig = Rig(source)
    await rig.adoption.finished()
    assert [type(command) for command in rig.rank.sent] == [Pulled, Adopt]
    assert source.num_pins == 0
    await asyncio.sleep(0)
    (unpin,) = source.unpinned
    assert (unpin.lease_id, unpin.complete) == ("rest", True)
    assert source.pages_read == [3 + num_pages - 1]
    await rig.session.close()


async def test_what_came_pinned_but_is_not_all_is_unpinned_and_pinned_anew() -> None:
    source = Source(record_with_rest(0))
    source.may_end.set()
    rig = Rig(source)
    await rig.adoption.finished()
    assert [type(command) for command in rig.rank.sent] == [Pulled, Adopt]
    assert source.num_pins == 1
    await asyncio.sleep(0)
    assert [(u.lease_id, u.complete) for u in source.unpinned] == [("rest", False), ("", True)]
    await rig.session.close()


async def test_pins_do_not_wait_for_other_pulls() -> None:
    source = Source(record_with_rest(1))
    source.may_end.set()
    source.turns = asyncio.Semaphore(1)
    rig = Rig(source)
    async with rig.session.pull_threads.turn(source.turns):
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert [unpin.lease_id for unpin in source.unpinned] == ["rest"]
    await rig.adoption.finished()
    assert [type(command) for command in rig.rank.sent] == [Pulled, Adopt]
    await rig.session.close()


async def test_a_session_waits_for_a_copy_whose_slot_has_ended() -> None:
    source = Source(RECORD)
    rig = Rig(source)
    assert await asyncio.to_thread(source.is_copying.wait, 5)
    ended = StepOutput(1, [Ended(rig.slot.number)], Load(0, 0, 0, 8, 8, 0), True)
    rig.session._events.apply(ended)
    assert not len(rig.session.slots)
    closing = asyncio.create_task(rig.session.close())
    await asyncio.sleep(0.05)
    assert rig.rank.num_sent_before_close is None, "the pool is still written"
    source.may_end.set()
    await asyncio.wait_for(closing, 5)
    assert rig.rank.sent == [TransferClosed(rig.slot.number)]
    assert rig.rank.num_sent_before_close == 1
    assert not rig.session.adoptions


async def test_a_source_that_ends_its_progress_early_keeps_its_link() -> None:
    rig = Rig(Source())
    await rig.adoption.finished()
    assert rig.slot.ending and rig.forgotten == []
    await rig.session.close()


async def test_a_link_that_fails_is_forgotten() -> None:
    source = Source(RECORD)
    source.failure = PeerGone("the peer closed the connection")
    source.may_end.set()
    rig = Rig(source)
    await rig.adoption.finished()
    assert rig.slot.ending and rig.forgotten == [source]
    await rig.session.close()
