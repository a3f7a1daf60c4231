"""Links that a rank reads over for its front. The contract suite runs over them as shm_by_rank;
here is what only they can meet."""

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from paceline.core.errors import EngineFailure, IncompatiblePeer, Unavailable
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import Piece, Source
from paceline.worker.rank_links import RankLinks
from paceline.worker.rank_messages import (
    ConnectLink,
    LinkFailure,
    LinkReply,
    RankCommand,
    ReadLink,
)
from paceline.worker.rank_reader import LinkCalls, RankReader
from tests.contract.ends import SETTINGS
from tests.contract.pools import SMALL, ids, make_pool


@pytest.fixture
def source() -> Iterator[Source]:
    source = registry.make_source("shm", make_pool(SMALL, 2, 1), SETTINGS)
    source.start()
    yield source
    source.close()


class Sent:
    """Commands, and a way to wait for so many."""

    def __init__(self) -> None:
        self.commands: list[RankCommand] = []
        self._arrived = asyncio.Semaphore(0)

    def add(self, command: RankCommand) -> None:
        self.commands.append(command)
        self._arrived.release()

    async def wait_for(self, num: int) -> list[RankCommand]:
        for _ in range(num):
            await asyncio.wait_for(self._arrived.acquire(), 5)
        return self.commands


def reader_of(calls: LinkCalls) -> RankReader:
    return RankReader("shm", calls, SMALL, 2)


async def test_calls_of_a_rank_that_ends_fail_and_later_ones_too() -> None:
    sent = Sent()
    calls = LinkCalls(sent.add)
    connecting = asyncio.create_task(asyncio.to_thread(reader_of(calls).connect, b"", 1.0))
    await sent.wait_for(1)
    calls.close()
    for attempt in (connecting, asyncio.to_thread(reader_of(calls).connect, b"", 1.0)):
        with pytest.raises(Unavailable, match="engine has stopped"):
            await asyncio.wait_for(attempt, 5)
    assert len(sent.commands) == 1


async def test_a_rank_that_takes_no_commands_fails_the_call() -> None:
    def refuse(command: RankCommand) -> None:
        raise Unavailable("full")

    with pytest.raises(Unavailable, match="full"):
        await asyncio.to_thread(reader_of(LinkCalls(refuse)).connect, b"", 1.0)


async def test_replies_find_their_calls_in_any_order() -> None:
    sent = Sent()
    calls = LinkCalls(sent.add)
    connecting = [
        asyncio.create_task(asyncio.to_thread(reader_of(calls).connect, bytes([i]), 1.0))
        for i in range(3)
    ]
    commands = await sent.wait_for(3)
    for call in reversed(commands):
        assert isinstance(call, ConnectLink)
        calls.reply(LinkReply(call.number))
    numbers = [(await attempt).number for attempt in connecting]
    by_address = {c.address: c.number for c in commands if isinstance(c, ConnectLink)}
    assert numbers == [by_address[bytes([i])] for i in range(3)]


async def test_an_error_outside_the_contract_is_the_engines() -> None:
    def answer(command: RankCommand) -> None:
        failure = LinkFailure("Strange", "odd", None)
        asyncio.get_running_loop().call_soon(calls.reply, LinkReply(1, b"", failure))

    calls = LinkCalls(answer)
    with pytest.raises(EngineFailure, match="odd"):
        await asyncio.to_thread(reader_of(calls).connect, b"", 1.0)


class Replies:
    """Collects what a rank answers."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.by_number: dict[int, LinkReply] = {}
        self.num_bugs = 0

    def add(self, reply: LinkReply) -> None:
        with self.changed:
            self.by_number[reply.number] = reply
            self.changed.notify()

    def add_bug(self) -> None:
        with self.changed:
            self.num_bugs += 1
            self.changed.notify()

    def wait_for(self, number: int) -> LinkReply:
        with self.changed:
            assert self.changed.wait_for(lambda: number in self.by_number, 5)
            return self.by_number[number]


@pytest.fixture
def replies() -> Replies:
    return Replies()


@pytest.fixture
def links(replies: Replies) -> Iterator[RankLinks]:
    links = RankLinks(make_pool(SMALL, 2), SETTINGS, replies.add, replies.add_bug)
    links.start(["cuda_ipc", "shm"])
    yield links
    links.close()


def test_a_transport_that_cannot_be_had_leaves_the_others(
    links: RankLinks, replies: Replies
) -> None:
    assert [name for name, _ in links.addresses()] == ["shm"]
    links.handle(ConnectLink(1, "cuda_ipc", b"", 1.0))
    failure = replies.wait_for(1).failure
    assert failure == LinkFailure(
        IncompatiblePeer.__name__, "cuda_ipc cannot be had here", "transport"
    )


def test_a_copy_that_fails_for_an_unknown_reason_is_reported_as_a_bug(
    links: RankLinks, replies: Replies, source: Source
) -> None:
    """On a device it may be a fault after which nothing there can be trusted."""
    links.handle(ConnectLink(1, "shm", source.address(), 1.0))
    assert replies.wait_for(1).failure is None
    outside = np.array([7]).tobytes()
    links.handle(ReadLink(2, 1, ids(0).tobytes(), outside, None, 1.0))
    with replies.changed:
        assert replies.changed.wait_for(lambda: replies.num_bugs == 1, 5)
    assert 2 not in replies.by_number


async def test_a_page_outside_the_pool_is_not_asked_for() -> None:
    """It would be taken for a fault of the rank, which ends it."""
    sent = Sent()
    calls = LinkCalls(sent.add)
    connecting = asyncio.create_task(asyncio.to_thread(reader_of(calls).connect, b"", 1.0))
    await sent.wait_for(1)
    calls.reply(LinkReply(1))
    link = await connecting
    with pytest.raises(IndexError, match="page 2: the pool has 2 pages"):
        link.read(Piece(ids(0), ids(2)), 1.0)
    assert len(sent.commands) == 1
