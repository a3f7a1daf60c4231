"""How soon a router's index is whole again after Redis lost what workers had told it.

Eight workers with 50,000 blocks each: their streams and writers run in one other process, the
router here, Redis in a third. The index is whole when each worker's part of it equals what that one
holds, in Redis, too.

<case>_s      seconds from when Redis answers again to an index that is whole, at the worst
<case>_least  blocks that the index knew at the least meanwhile, of all

restart       killed for a second, comes back empty at the same address, as after a failover
flush         FLUSHALL
evict         the key sets and the stream are gone, records and numbers are still there
pause         SIGSTOP for longer than everybody's patience
"""

import asyncio
import functools
import logging
import multiprocessing
import operator
import random
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import redis.asyncio
import structlog

from benchmarks.common import Figures, Options, publish, show
from paceline.core.keys import INDEX_KEY_BYTES
from paceline.engine.messages import Stored
from paceline.router.config import RouterConfig
from paceline.router.mirror import WorkerMirror
from paceline.router.service import Router
from paceline.rpc.redis_schema import DEVICE, EVENTS, PREFIX, Digest, keys_name
from paceline.v1 import worker_pb2
from paceline.worker.redis_record import RedisRecord
from tests.support.fake_worker import SECRET, Cluster, FakeWorker
from tests.support.redis_server import RedisServer, redis_server
from tests.support.waits import until

NUM_WORKERS, NUM_BLOCKS, NUM_QUICK_BLOCKS = 8, 50_000, 5_000
DOWN_S, PAUSE_S, PATIENCE_S = 1.0, 2.5, 60.0
REPEATS = 3

Damage = Callable[[RedisServer, redis.asyncio.Redis], Awaitable[None]]


async def _restart(server: RedisServer, client: redis.asyncio.Redis) -> None:
    server.kill()
    await asyncio.sleep(DOWN_S)
    server.restart()


async def _flush(server: RedisServer, client: redis.asyncio.Redis) -> None:
    await client.flushall()


async def _evict(server: RedisServer, client: redis.asyncio.Redis) -> None:
    await client.delete(EVENTS, *await client.keys(PREFIX + "keys:*"))


async def _pause(server: RedisServer, client: redis.asyncio.Redis) -> None:
    server.pause()
    await asyncio.sleep(PAUSE_S)
    server.resume()


DAMAGES: dict[str, Damage] = {
    "restart": _restart,
    "flush": _flush,
    "evict": _evict,
    "pause": _pause,
}


def keys_of(worker: int, num_blocks: int) -> list[bytes]:
    chance = random.Random(worker)
    return [chance.randbytes(INDEX_KEY_BYTES) for _ in range(num_blocks)]


def write(url: str, num_blocks: int, told: Connection) -> None:
    """The workers' process, until it is told to end."""
    asyncio.run(_write(url, num_blocks, told))


async def _write(url: str, num_blocks: int, told: Connection) -> None:
    written = [RedisRecord(url, beat_s=1.0) for _ in range(NUM_WORKERS)]
    cluster = Cluster()
    workers = [FakeWorker(f"d{i}", worker_pb2.ROLE_DECODE, cluster) for i in range(NUM_WORKERS)]
    for number, (worker, record) in enumerate(zip(workers, written, strict=True)):
        await worker.start()
        record.publish(worker.info)
        record.add(Stored(keys_of(number, num_blocks)))
    await asyncio.to_thread(told.recv)
    for worker, record in zip(workers, written, strict=True):
        await record.withdraw()
        await worker.die()


class Watched:
    """The router, and what of its index is whole."""

    def __init__(self, router: Router, num_blocks: int) -> None:
        self.router = router
        self._num_blocks = num_blocks
        self._digests: dict[str, Digest] = {}
        for number in range(NUM_WORKERS):
            xor = functools.reduce(operator.xor, map(int.from_bytes, keys_of(number, num_blocks)))
            self._digests[f"d{number}"] = Digest(num_blocks, xor)

    def num_known(self) -> int:
        """Blocks that lookups find."""
        mirrors = self.router.mirrors.workers.values()
        return sum(map(self._num_found, mirrors))

    def _num_found(self, mirror: WorkerMirror) -> int:
        views = [*mirror._views.values(), *mirror._former.values()]
        digests = (self.router.index.digest(view) for view in views)
        return max((digest.num_keys for digest in digests if digest is not None), default=0)

    def is_whole(self) -> bool:
        mirrors = self.router.mirrors.workers
        return len(mirrors) == NUM_WORKERS and all(map(self._is_whole, mirrors.values()))

    def _is_whole(self, mirror: WorkerMirror) -> bool:
        view = mirror._views.get(DEVICE)
        if mirror.needs_snapshot or mirror._former or view is None:
            return False
        return self.router.index.digest(view) == self._digests[mirror.worker_id]

    async def is_stored(self, client: redis.asyncio.Redis) -> bool:
        mirrors = self.router.mirrors.workers.values()
        names = [keys_name(mirror.worker_id, mirror.incarnation) for mirror in mirrors]
        counts = [await client.scard(name) for name in names]
        return len(counts) == NUM_WORKERS and all(num == self._num_blocks for num in counts)


async def heal(watched: Watched, server: RedisServer, damage: Damage) -> tuple[float, int]:
    """Seconds until router and Redis have it all, and the least that was known meanwhile."""
    async with redis.asyncio.Redis.from_url(server.url, socket_timeout=5) as client:
        await damage(server, client)
        began, least = time.perf_counter(), watched.num_known()
        while not (await watched.is_stored(client) and watched.is_whole()):
            least = min(least, watched.num_known())
            assert time.perf_counter() - began < PATIENCE_S, "it does not heal"
            await asyncio.sleep(0.02)
        healed_s = time.perf_counter() - began
        await asyncio.sleep(random.uniform(0.5, 1.5))  # at any moment between two beats
    return healed_s, least


def measure(options: Options) -> Figures:
    quiet = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=quiet)
    num_blocks, repeats = (NUM_QUICK_BLOCKS, 1) if options.quick else (NUM_BLOCKS, REPEATS)
    return asyncio.run(_measure(num_blocks, repeats))


async def _measure(num_blocks: int, repeats: int) -> Figures:
    figures: dict[str, float] = {}
    ours, theirs = multiprocessing.Pipe()
    with redis_server() as server:
        writer = multiprocessing.get_context("spawn").Process(
            target=write, args=(server.url, num_blocks, theirs), daemon=True
        )
        writer.start()
        router = Router(RouterConfig(port=0, probe_port=0, secret=SECRET, redis_url=server.url))
        await router.start()
        watched = Watched(router, num_blocks)
        await until(watched.is_whole, PATIENCE_S)
        for name, damage in DAMAGES.items():
            found = [await heal(watched, server, damage) for _ in range(repeats)]
            show(f"{name}: {', '.join(f'{seconds:.2f}' for seconds, _ in found)} s")
            figures[f"{name}_s"] = max(seconds for seconds, _ in found)
            figures[f"{name}_least"] = min(least for _, least in found)
        await router.stop()
        ours.send("end")
        await asyncio.to_thread(writer.join, 10)
    return figures


if __name__ == "__main__":
    sys.exit(publish("index_heals", measure))
