"""Whom a worker meets of those who are registered, with a real Redis."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import redis

from paceline.core.errors import PeerGone
from paceline.rpc import records
from paceline.v1 import worker_pb2
from paceline.worker import introductions
from paceline.worker.config import Timers, WorkerConfig
from paceline.worker.introductions import Introductions
from tests.support.redis_server import RedisServer
from tests.support.redis_server import redis_server as running_redis
from tests.support.waits import wait_for

SECRET = "a secret of the tests"
Key = tuple[str, str]


class Peers:
    """Remembers who was met; `gone` do not answer."""

    def __init__(self) -> None:
        self.met: list[tuple[Key, str]] = []
        self.gone: set[str] = set()
        self.known: set[Key] = set()

    def knows(self, key: Key) -> bool:
        return key in self.known

    def connected(self) -> list[Key]:
        return list(self.known)

    async def meet(self, key: Key, endpoint: str) -> None:
        self.met.append((key, endpoint))
        if key[0] in self.gone:
            raise PeerGone("nobody answers")
        self.known.add(key)


def info(name: str, digest: str = "ab") -> worker_pb2.WorkerInfo:
    made = worker_pb2.WorkerInfo(
        worker_id=name, incarnation="1", endpoint=f"{name}:1", content_digest=digest
    )
    return records.sign(made, SECRET.encode())


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as started:
        yield started


@pytest.fixture
def store(server: RedisServer) -> "Iterator[redis.Redis]":
    client = redis.Redis.from_url(server.url)
    client.flushall()
    yield client
    client.close()


@asynccontextmanager
async def meeting(server: RedisServer, peers: Peers) -> AsyncIterator[None]:
    config = WorkerConfig(
        secret=SECRET, model="/", redis_url=server.url, timers=Timers(beat_s=0.05)
    )
    made = Introductions(config, info("me"), peers)  # type: ignore[arg-type]
    task = asyncio.create_task(made.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def register(store: "redis.Redis", *infos: worker_pb2.WorkerInfo) -> None:
    for one in infos:
        store.set(f"pl:1:worker:{one.worker_id}", one.SerializeToString())


async def test_each_of_the_same_model_is_met_once(
    server: RedisServer, store: "redis.Redis"
) -> None:
    peers = Peers()
    peers.gone = {"gone"}
    register(store, info("me"), info("a"), info("gone"), info("other", digest="cd"))
    async with meeting(server, peers):
        await asyncio.sleep(0.4)
        register(store, info("late"))
        await asyncio.sleep(0.4)
    assert sorted(peers.met) == [((n, "1"), f"{n}:1") for n in ("a", "gone", "late")]


async def test_what_is_no_record_of_ours_is_passed_over(
    server: RedisServer, store: "redis.Redis"
) -> None:
    forged = info("forged")
    forged.endpoint = "evil:1"
    register(store, forged, info("good"))
    store.set("pl:1:worker:junk", b"\xff" * 100_000)
    store.rpush("pl:1:worker:list", "x")
    peers = Peers()
    async with meeting(server, peers):
        await asyncio.sleep(0.4)
    assert peers.met == [(("good", "1"), "good:1")]


async def test_it_meets_no_more_than_its_bound(
    server: RedisServer, store: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(introductions, "MAX_MET", 3)
    register(store, *(info(f"w{i}") for i in range(10)))
    peers = Peers()
    async with meeting(server, peers):
        await asyncio.sleep(0.6)
    assert len(peers.met) == 3


async def test_a_redis_that_comes_back_is_asked_again(server: RedisServer) -> None:
    peers = Peers()
    server.kill()
    async with meeting(server, peers):
        await asyncio.sleep(0.2)
        server.restart()
        with redis.Redis.from_url(server.url) as client:
            register(client, info("a"))
        await asyncio.to_thread(wait_for, lambda: bool(peers.met), 10)
