"""What the rank pins with a hand-off's record: leased to its reader, or unpinned again."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.sampling import SamplingParams
from paceline.engine.messages import (
    FirstToken,
    HandoffReady,
    KeyRun,
    Load,
    Pin,
    Pinned,
    PinnedPage,
    RequestSpec,
    StepOutput,
    Unpin,
)
from paceline.v1 import common_pb2, kv_pb2, worker_pb2
from paceline.worker.config import WorkerConfig
from paceline.worker.handoffs import reader_of
from paceline.worker.metrics import WorkerMetrics
from paceline.worker.pins import pin_or_let_go
from paceline.worker.role import WorkerRole
from paceline.worker.router_stream import RouterStream
from paceline.worker.session import Session

NUM_PAGES = 8
REST = Pinned([[PinnedPage(3, 1, [9]), PinnedPage(4, 2, [9])]], [PinnedPage(5, 1, [7])], 4)
PAGES = [(3, 1), (4, 2), (5, 1)]


class Source:
    """A prefill slot of 36 tokens under a ticket; `unpinned`: what its rank was told to unpin."""

    def __init__(self) -> None:
        self.unpinned: list[tuple[int, int]] = []
        self.pinned: asyncio.Future[Pinned] | None = None  # answers Pin
        rank: Any = SimpleNamespace(
            ready=SimpleNamespace(num_pages=NUM_PAGES, canary=None, content_parts={}),
            program=SimpleNamespace(pid=os.getpid()),
            link=SimpleNamespace(send=lambda _: None, call=self.call, last_step_unix_us=1),
        )
        connectors: Any = SimpleNamespace()
        config = WorkerConfig(secret="a secret of the tests", model="/")
        info = worker_pb2.WorkerInfo(vocab_size=100)
        metrics, role = WorkerMetrics("m", "decode"), WorkerRole(worker_pb2.ROLE_DECODE, 1.0)
        self.session = Session(config, rank, info, connectors, metrics, print, role)
        request = RequestSpec("r", list(range(36)), 36, bytes(32), SamplingParams(), (0,))
        self.slot = self.session.slots.open(RouterStream(), 7, request)
        self.ticket = common_pb2.Ticket(
            request_id="r",
            attempt=1,
            reader_worker="d",
            reader_incarnation="1",
            expires_unix_ms=int(time.time() * 1000) + 60_000,
        )
        self.handoff = self.slot.handoff = self.session.handoffs.open(self.slot.number, self.ticket)

    async def call(self, call: object) -> Pinned | None:
        if isinstance(call, Pin):
            assert self.pinned is not None
            return await self.pinned
        assert isinstance(call, Unpin)
        self.unpinned += call.pages
        return None

    def is_ready(self) -> None:
        """The rank's prompt is done."""
        ready = HandoffReady(self.slot.number, 36, [FirstToken(0, 5)], REST)
        self.session._events.apply(StepOutput(1, [ready], Load(0, 0, 0, 8, 8, 0), True))


@pytest.fixture
async def source() -> AsyncIterator[Source]:
    yield Source()


async def told(source: Source) -> kv_pb2.ProgressEvent:
    return [event async for event in source.handoff.follow()][-1]


async def test_the_reader_gets_them_under_a_lease_of_its_own(source: Source) -> None:
    source.is_ready()
    rest = (await told(source)).rest
    assert [[page.page for page in run.pages] for run in rest.runs] == [[3, 4]]
    assert [page.page for page in rest.tails] == [5] and rest.num_tail_tokens == 4
    source.session.end(source.slot)  # what the reader knows of is the reader's to unpin
    leases = source.session.leases
    assert leases.release(rest.lease_id, reader_of(source.ticket)) == PAGES
    await asyncio.sleep(0)
    assert source.unpinned == []


async def test_a_reader_that_comes_back_pins_by_itself(source: Source) -> None:
    source.is_ready()
    await told(source)
    again = await told(source)
    assert again.HasField("record") and not again.HasField("rest")


async def test_a_slot_that_ends_untold_unpins_them(source: Source) -> None:
    source.is_ready()
    source.session.end(source.slot)
    await asyncio.sleep(0)
    assert source.unpinned == PAGES and not len(source.session.leases)


async def test_a_slot_that_has_ended_before_unpins_them(source: Source) -> None:
    source.session.end(source.slot)
    source.is_ready()
    await asyncio.sleep(0)
    assert source.unpinned == PAGES and not len(source.session.leases)


async def test_they_stay_until_their_reader_knows_of_them(source: Source) -> None:
    """It reads no events while it pulls a range, which may take longer than some beats."""
    source.is_ready()
    rest = (await told(source)).rest
    leases, reader = source.session.leases, reader_of(source.ticket)
    for _ in range(4):
        assert leases.beat(reader, []) == ([], [])
    assert leases.beat(reader, [rest.lease_id]) == ([], [])
    assert [leases.beat(reader, [])[0] for _ in range(2)] == [[], PAGES]


async def test_once_the_slot_has_ended_its_reader_must_know_of_them(source: Source) -> None:
    source.is_ready()
    await told(source)
    source.session.end(source.slot)
    leases, reader = source.session.leases, reader_of(source.ticket)
    assert [leases.beat(reader, [])[0] for _ in range(2)] == [[], PAGES]


async def test_what_is_pinned_for_a_caller_that_was_cut_off_is_unpinned(source: Source) -> None:
    answer: asyncio.Future[Pinned] = asyncio.get_running_loop().create_future()
    source.pinned = answer
    asked = [KeyRun(0, [bytes(32), bytes(32)])]
    pinning = asyncio.create_task(pin_or_let_go(source.session, source.ticket, asked, None))
    await asyncio.sleep(0)
    pinning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pinning
    answer.set_result(Pinned(REST.runs))
    for _ in range(5):
        await asyncio.sleep(0)
    assert source.unpinned == PAGES[:2] and not len(source.session.leases)


async def test_beyond_the_cap_the_record_comes_without_them(source: Source) -> None:
    """The cap is half of the pool: four pages."""
    source.session.leases.promise(2)
    source.is_ready()
    last = await told(source)
    assert last.HasField("record") and not last.HasField("rest")
    await asyncio.sleep(0)
    assert source.unpinned == PAGES and not len(source.session.leases)
