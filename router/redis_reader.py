"""What the router reads from Redis (rpc/redis_schema.py). Every call is bounded in time, and most
in size."""

from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import Counter
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError

from paceline.router.mirror import RefusedRecord
from paceline.rpc.records import MAX_RECORD_BYTES
from paceline.rpc.redis_schema import EVENTS, WORKER_PREFIX, keys_name, sequence_name

EVENTS_PER_READ = 256
READ_BLOCK_MS = 500
MAX_WORKERS = 1024
_SCANS_PER_ROUND = 64  # of SCAN_COUNT keys: foreign keys in the same Redis cost a bounded effort
_SCAN_COUNT = 512
_MEMBERS_PER_SCAN = 2048

Entry = tuple[bytes, dict[bytes, bytes]]


class RedisReader:
    """Raises RedisError, OSError or TimeoutError when Redis does not answer in time."""

    def __init__(self, url: str, timeout_s: float, refused: Counter) -> None:
        self._refused = refused
        self._cursor = 0
        self._redis: Any = Redis.from_url(  # typed for str answers, these are bytes
            url,
            socket_timeout=timeout_s + READ_BLOCK_MS / 1000,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            max_connections=4,
        )

    async def close(self) -> None:
        await self._redis.aclose()

    async def worker_keys(self) -> set[bytes]:
        """Keys of worker records, found by the next part of a scan that goes on for ever."""
        found: set[bytes] = set()
        for _ in range(_SCANS_PER_ROUND):
            self._cursor, keys = await self._redis.scan(
                self._cursor, match=WORKER_PREFIX + "*", count=_SCAN_COUNT
            )
            found.update(keys)
            if self._cursor == 0 or len(found) > MAX_WORKERS:
                break
        return found

    async def values(self, keys: list[bytes]) -> list[bytes | None]:
        """The start of each value; None where there is none, or one of another type: counted."""
        if not keys:
            return []
        async with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.getrange(key, 0, MAX_RECORD_BYTES)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        num_refused = sum(isinstance(answer, ResponseError) for answer in answers)
        self._refused.labels("key_type").inc(num_refused)
        return [answer or None if isinstance(answer, bytes) else None for answer in answers]

    async def stream_position(self) -> bytes:
        entries: list[Entry] = await self._redis.xrevrange(EVENTS, count=1)
        return entries[0][0] if entries else b"0-0"

    async def events(self, position: bytes) -> list[Entry]:
        """Entries after `position`; empty after half a second without any."""
        answer: Any = await self._redis.xread(
            {EVENTS: position}, count=EVENTS_PER_READ, block=READ_BLOCK_MS
        )
        return answer[0][1] if answer else []

    async def sequences(self, workers: list[tuple[str, str]]) -> list[bytes | None]:
        """The raw number of each (worker id, incarnation)."""
        return await self.values([sequence_name(w, i).encode() for w, i in workers])

    async def members(self, worker_id: str, incarnation: str) -> AsyncIterator[list[bytes]]:
        """The key set in pieces. Raises RefusedRecord when it is no set."""
        key, cursor = keys_name(worker_id, incarnation), 0
        while True:
            try:
                cursor, members = await self._redis.sscan(key, cursor, count=_MEMBERS_PER_SCAN)
            except ResponseError:
                raise RefusedRecord("keys_type") from None
            yield members
            if cursor == 0:
                return
