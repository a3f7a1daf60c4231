"""This worker in Redis: its record under a lease, and the events of its pool. A hint, no more.

The set of keys, its number and the event change in one script, which refuses when Redis does not
have what was written before: it was emptied, or is another one. Nothing here is awaited by serving:
a Redis that is slow, paused or gone costs dropped events, which a resync replaces when it is back.
"""

import asyncio
import contextlib
import itertools

import redis.asyncio
import structlog
from redis.exceptions import RedisError

from paceline.engine.messages import Removed, Stored
from paceline.rpc.redis_schema import (
    DEVICE,
    DIGEST_S,
    EVENTS,
    KEYS_TTL_MS,
    LEASE_BEATS,
    MAX_EVENTS,
    Field,
    Kind,
    keys_name,
    sequence_name,
    worker_name,
)
from paceline.v1 import worker_pb2
from paceline.worker.index_events import IndexEvent, IndexEvents

TIMEOUT_S = 1.0
RETRY_S = 0.25  # after Redis failed
CHECK_S = 0.3  # between two looks whether Redis has lost what was written
EVENT_DELAY_S = 0.01  # events of a few steps go out together
MAX_IN_FLIGHT = 16  # events that are sent at once: a round trip costs more than most of them

# KEYS: set, sequence, stream. ARGV: worker, incarnation, kind, packed keys, ttl, stream length,
# sequence, tier, what follows a key in the set, size of the set. Returns 0 when it did nothing.
_APPLY = f"""
local kind, packed = ARGV[3], ARGV[4]
if kind == '{Kind.CLEARED}' then
  redis.call('DEL', KEYS[1])
  local type = redis.call('TYPE', KEYS[3]).ok
  if type ~= 'stream' then redis.call('DEL', KEYS[3]) end
elseif tonumber(redis.call('GET', KEYS[2]) or -1) ~= tonumber(ARGV[7]) - 1 then return 0
elseif kind == '{Kind.DIGEST}' then
  if redis.call('SCARD', KEYS[1]) ~= tonumber(ARGV[10]) then return 0 end
else
  local change, members = 'SREM', {{}}
  if kind == '{Kind.STORED}' then change = 'SADD' end
  for i = 1, #packed, 16 do
    members[#members + 1] = string.sub(packed, i, i + 15) .. ARGV[9]
  end
  redis.call(change, KEYS[1], unpack(members))
end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('SET', KEYS[2], ARGV[7], 'PX', ARGV[5])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[6], '*',
  '{Field.WORKER}', ARGV[1], '{Field.INCARNATION}', ARGV[2], '{Field.SEQUENCE}', ARGV[7],
  '{Field.KIND}', ARGV[3], '{Field.KEYS}', packed, '{Field.TIER}', ARGV[8])
return 1
"""

_log = structlog.get_logger("paceline.worker")


class RedisRecord:
    """`publish` an incarnation, `withdraw` it when it ends, `close` at exit.

    Without a URL every call does nothing.
    """

    def __init__(self, redis_url: str, beat_s: float) -> None:
        self._url = redis_url
        self._beat_s = beat_s
        self._events = IndexEvents()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._info: worker_pb2.WorkerInfo | None = None
        self.is_up = False

    def add(self, event: Stored | Removed, tier: str = DEVICE) -> None:
        if self._url:
            self._events.add(event, tier)
            self._wake.set()

    def forget_tiers(self) -> None:
        """What they held is gone. Between two incarnations."""
        self._events.forget_tiers()

    def publish(self, info: worker_pb2.WorkerInfo) -> None:
        if self._url:
            self._info = info
            self._events = IndexEvents(self._events)
            self._task = asyncio.create_task(self._write(info, self._events))

    async def withdraw(self) -> None:
        """Takes the record back, so that routers need not wait for its lease to end."""
        task, self._task = self._task, None
        if task is None or self._info is None:
            return
        task.cancel()
        self._wake.set()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S), self._client() as client:
                await client.delete(worker_name(self._info.worker_id), *_names(self._info))

    def _client(self) -> redis.asyncio.Redis:
        return redis.asyncio.from_url(
            self._url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=None,
        )

    def _is_wanted(self) -> bool:
        """A cancellation may be lost where it meets the end of a wait: withdraw() says it twice."""
        return asyncio.current_task() is self._task

    async def _write(self, info: worker_pb2.WorkerInfo, events: IndexEvents) -> None:
        while self._is_wanted():
            try:
                async with self._client() as client:
                    await self._serve(client, info, events)
            except (RedisError, OSError, TimeoutError) as error:
                if self.is_up:
                    _log.warning("redis is away; routing goes on without it", error=str(error))
                self.is_up = False
                events.lost()
                await asyncio.sleep(RETRY_S)

    async def _serve(
        self,
        client: redis.asyncio.Redis,
        info: worker_pb2.WorkerInfo,
        events: IndexEvents,
    ) -> None:
        loop = asyncio.get_running_loop()
        script = await client.script_load(_APPLY)  # that a Redis forgets is an error: it is new
        next_beat = next_digest = loop.time()
        while self._is_wanted():
            if loop.time() >= next_beat:
                await self._beat(client, info)
                next_beat = loop.time() + min(CHECK_S, self._beat_s)
            if loop.time() >= next_digest:
                events.add_digests()
                next_digest = loop.time() + DIGEST_S
            self._wake.clear()
            waiting = events.take()
            while batch := list(itertools.islice(waiting, MAX_IN_FLIGHT)):
                if any(event.kind == Kind.CLEARED for event in batch):
                    next_digest = loop.time()  # it ends what follows
                    self._wake.set()
                numbers = [events.next_sequence() for _ in batch]
                if not await _apply(client, script, info, batch, numbers):
                    _log.warning("redis has lost the index; writing it anew")
                    events.lost()
                    self._wake.set()
                    break
            self.is_up = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_beat):
                    await self._wake.wait()
            await asyncio.sleep(EVENT_DELAY_S)

    async def _beat(self, client: redis.asyncio.Redis, info: worker_pb2.WorkerInfo) -> None:
        """Renews the record; a set that has vanished (flushed, or evicted) is written anew."""
        lease_ms = round(LEASE_BEATS * 1000 * self._beat_s)
        async with client.pipeline(transaction=False) as pipe:
            pipe.set(worker_name(info.worker_id), info.SerializeToString(), px=lease_ms)
            for name in _names(info):
                pipe.pexpire(name, KEYS_TTL_MS)
            _, has_keys, has_sequence = await pipe.execute()
        if self.is_up and not (has_sequence and (has_keys or not self._events.should_be_there)):
            self._events.lost()


async def _apply(
    client: redis.asyncio.Redis,
    script: str,
    info: worker_pb2.WorkerInfo,
    events: list[IndexEvent],
    numbers: list[int],
) -> bool:
    """One after the other. False when Redis has not what was written before: then it refuses those
    that come after, too."""
    names, owner = [*_names(info), EVENTS], (info.worker_id, info.incarnation)
    async with client.pipeline(transaction=False) as pipe:
        for event, sequence in zip(events, numbers, strict=True):
            suffix = "" if event.tier == DEVICE else event.tier
            packed = b"".join(event.keys)
            limits = (KEYS_TTL_MS, MAX_EVENTS, sequence)
            args: list[str | bytes | int] = [*owner, event.kind, packed, *limits]
            args += [event.tier, suffix, event.num_held]
            pipe.evalsha(script, len(names), *names, *args)
        return all(await pipe.execute())


def _names(info: worker_pb2.WorkerInfo) -> tuple[str, str]:
    owner = (info.worker_id, info.incarnation)
    return keys_name(*owner), sequence_name(*owner)
