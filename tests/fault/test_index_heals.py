"""Redis emptied, restarted, slow, evicting or damaged: the index is whole again in 2 s.

The worker's side is the real one; what it stores while Redis is away must arrive, too.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from paceline.core.keys import chain_keys, root_key, tenant_salt
from paceline.engine.messages import Removed, Stored
from paceline.router.mirror import WorkerMirror
from paceline.rpc.redis_schema import EVENTS, keys_name, sequence_name
from paceline.v1 import worker_pb2
from paceline.worker import redis_record
from paceline.worker.redis_record import RedisRecord
from tests.support.fake_worker import DIGEST, SECRET
from tests.support.redis_server import RedisServer, redis_server
from tests.support.router_bench import Bench, router_bench
from tests.support.waits import until

HEAL_S = 2.0
_KEYS = chain_keys(root_key(DIGEST, tenant_salt(SECRET.encode(), "t")), list(range(160)))


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@dataclass
class Published:
    """One worker whose pool is published, and the router that follows."""

    bench: Bench
    record: RedisRecord
    owner: tuple[str, str]

    @property
    def num_blocks(self) -> int:
        return self.bench.router.mirrors.held_blocks(b"".join(_KEYS)).in_best_tier.get(
            self.owner, 0
        )

    @property
    def mirror(self) -> WorkerMirror:
        return self.bench.router.mirrors.workers[self.owner[0]]

    @property
    def num_diverged(self) -> float:
        return self.bench.router.metrics.diverged._value.get()

    @property
    def num_refused(self) -> float:
        return self.bench.router.metrics.refused.labels("event_form")._value.get()

    def hold(self, num_blocks: int) -> None:
        self.record.add(Stored(_KEYS[:num_blocks]))
        self.record.add(Removed(_KEYS[num_blocks:]))

    async def redis_holds(self, num_blocks: int) -> None:
        async with asyncio.timeout(5):
            while await self.bench.redis.scard(keys_name(*self.owner)) != num_blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@asynccontextmanager
async def _published(store: RedisServer) -> AsyncIterator[Published]:
    async with router_bench(store, redis_timeout_s=0.3) as bench:
        worker = await bench.add("d0")
        record = RedisRecord(store.url, beat_s=1.0)
        record.publish(worker.info)
        published = Published(bench, record, ("d0", worker.info.incarnation))
        published.hold(4)
        await until(lambda: published.num_blocks == 4)
        try:
            yield published
        finally:
            await record.withdraw()


Damage = Callable[[Published, RedisServer], Awaitable[None]]


async def _flush(published: Published, store: RedisServer) -> None:
    await published.bench.redis.flushall()


async def _restart(published: Published, store: RedisServer) -> None:
    store.kill()
    published.hold(6)
    await asyncio.sleep(1.5)
    assert published.num_blocks == 4, "what was known still counts"
    store.restart()


async def _pause(published: Published, store: RedisServer) -> None:
    store.pause()
    published.hold(6)
    await asyncio.sleep(2.5)
    assert published.num_blocks == 4
    store.resume()


async def _evict(published: Published, store: RedisServer) -> None:
    await published.bench.redis.delete(keys_name(*published.owner), EVENTS)


async def _turn_back(published: Published, store: RedisServer) -> None:
    """As after a failover to a replica that lags, whose clock does, too."""
    redis = published.bench.redis
    await redis.xadd(EVENTS, {"k": "of tomorrow"}, id=f"{round(time.time() + 86400)}000-1")
    await until(lambda: published.num_refused == 1)
    await redis.set(sequence_name(*published.owner), 1)
    await redis.delete(EVENTS)


async def _retype(published: Published, store: RedisServer) -> None:
    redis = published.bench.redis
    names = (EVENTS, keys_name(*published.owner), sequence_name(*published.owner))
    await redis.delete(*names)
    for name in names:
        await redis.lpush(name, "a list")


async def _forget_scripts(published: Published, store: RedisServer) -> None:
    await published.bench.redis.script_flush()


_DAMAGES = [
    _flush,
    _restart,
    _forget_scripts,
    *(pytest.param(d, marks=pytest.mark.slow) for d in (_pause, _evict, _turn_back, _retype)),
]


@pytest.mark.parametrize("damage", _DAMAGES)
async def test_what_is_stored_meanwhile_is_known_soon_after(
    store: RedisServer, damage: Damage
) -> None:
    async with _published(store) as published:
        await damage(published, store)
        began = time.perf_counter()
        published.hold(10)
        seen = [published.num_blocks]
        while seen[-1] < 10:
            await asyncio.sleep(0.005)
            seen.append(published.num_blocks)
        await published.redis_holds(10)
        assert time.perf_counter() - began < HEAL_S
        assert min(seen) >= 4 or damage is _retype, "it never looked emptier than it was"
        published.hold(3)
        await until(lambda: published.num_blocks == 3)


async def test_a_digest_that_differs_costs_one_snapshot(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sets that were changed by others, in Redis and in the mirror, without any event."""
    monkeypatch.setattr(redis_record, "DIGEST_S", 0.2)
    async with _published(store) as published:
        index = published.bench.router.index
        view = published.mirror._views["device"]
        index.remove(view, _KEYS[1][:16])
        assert published.num_blocks == 1
        await until(lambda: published.num_blocks == 4)
        assert published.num_diverged == 1
        await published.bench.redis.srem(keys_name(*published.owner), _KEYS[0][:16])
        await published.redis_holds(4)
        assert published.num_blocks == 4
        await asyncio.sleep(0.7)  # further digests agree
        assert published.num_diverged == 1


async def test_a_set_that_was_evicted_is_written_anew_before_anything_changes(
    store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By none of the digests, which come later."""
    monkeypatch.setattr(redis_record, "DIGEST_S", 1000.0)
    async with _published(store) as published:
        await published.redis_holds(4)
        await published.bench.redis.delete(keys_name(*published.owner))
        await published.redis_holds(4)
        assert published.num_blocks == 4
        published.hold(0)  # a set without members is none, and nothing is missing
        await until(lambda: published.num_blocks == 0)
        sequence = await published.bench.redis.get(sequence_name(*published.owner))
        await asyncio.sleep(3 * redis_record.CHECK_S)
        assert await published.bench.redis.get(sequence_name(*published.owner)) == sequence


async def test_a_record_is_withdrawn_whatever_is_being_written(store: RedisServer) -> None:
    """A cancellation may be lost inside of a call to Redis; the end of a worker must not be."""
    for number in range(12):
        record = RedisRecord(store.url, beat_s=1.0)
        record.publish(worker_pb2.WorkerInfo(worker_id="w", incarnation=str(number)))
        await asyncio.sleep(0.02)
        record.add(Stored(_KEYS))
        async with asyncio.timeout(3):
            await record.withdraw()
