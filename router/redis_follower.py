"""Follows Redis: finds workers, keeps the mirrors of what they hold. Redis is a hint.

While it is down, paused, empty or full of junk, everything here waits or refuses, and routing goes
on with what is known and with the workers' own streams.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from redis.exceptions import RedisError, ResponseError

from paceline.core.errors import InvalidRequest
from paceline.router.fleet import Fleet
from paceline.router.metrics import RouterMetrics
from paceline.router.mirror import (
    Diverged,
    MirrorSet,
    RefusedRecord,
    WorkerMirror,
    parse_event,
    parse_sequence,
)
from paceline.router.redis_reader import MAX_WORKERS, RedisReader
from paceline.rpc import records, redis_schema

DISCOVER_S = 1.0
SNAPSHOT_PAUSE_S = 1.0  # between two snapshots of one worker
STREAM_START = b"0-0"
BACKOFF_S = (0.1, 0.5)  # first and longest pause after Redis failed
_WORKER_PREFIX = redis_schema.WORKER_PREFIX.encode()

log = structlog.stdlib.get_logger("paceline.router")


class RedisFollower:
    def __init__(
        self,
        reader: RedisReader,
        fleet: Fleet,
        mirrors: MirrorSet,
        metrics: RouterMetrics,
        secret: str,
    ) -> None:
        self._reader = reader
        self._fleet = fleet
        self._mirrors = mirrors
        self._metrics = metrics
        self._secret = secret.encode()
        self._position: bytes | None = None
        self._refused_before: dict[bytes, bytes] = {}
        self.is_up = False
        self.looked = asyncio.Event()  # once, at all records

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(
            self._repeat(self.discover, DISCOVER_S),
            self._repeat(self.follow_events, 0.0),
        )

    async def _repeat(self, round_: Callable[[], Awaitable[None]], pause_s: float) -> None:
        failure_pause = BACKOFF_S[0]
        while True:
            try:
                await round_()
            except ResponseError:  # it answers, but the key is not what a worker writes
                self._metrics.refused.labels("key_type").inc()
                await asyncio.sleep(BACKOFF_S[1])
            except (RedisError, OSError, TimeoutError) as error:
                self._note_state(False, type(error).__name__)
                await asyncio.sleep(failure_pause)
                failure_pause = min(2 * failure_pause, BACKOFF_S[1])
            else:
                self._note_state(True)
                failure_pause = BACKOFF_S[0]
                await asyncio.sleep(pause_s)

    def _note_state(self, up: bool, why: str = "") -> None:
        if up and not self.is_up:
            log.info("redis answers")
        elif self.is_up and not up:
            log.warning("redis does not answer; routing goes on without it", why=why)
        self.is_up = up
        self._metrics.redis_up.set(up)

    # --- who is there -------------------------------------------------------------------------

    async def discover(self) -> None:
        known = {_WORKER_PREFIX + worker_id.encode() for worker_id in self._fleet.links}
        found = await self._reader.worker_keys()
        keys = [*known, *(found - known)][:MAX_WORKERS]
        for key, raw in zip(keys, await self._reader.values(keys), strict=True):
            worker_id = key.removeprefix(_WORKER_PREFIX).decode(errors="replace")
            if raw is None or not self._take_record(key, worker_id, raw):
                await self._lease_gone(worker_id)
        self.looked.set()
        self._follow_sessions()
        await self._check_lag()

    def _take_record(self, key: bytes, worker_id: str, raw: bytes) -> bool:
        try:
            info = records.parse(raw, self._secret)
        except InvalidRequest as error:
            self._refuse(key, raw, "record", error.message)
            return False
        if info.worker_id != worker_id:
            self._refuse(key, raw, "record_key", f"names worker {info.worker_id!r}")
            return False
        self._refused_before.pop(key, None)
        self._fleet.add(info)
        if self._fleet.links[worker_id].session is None:
            self._mirrors.follow(worker_id, info.incarnation)
        return True

    def _refuse(self, key: bytes, raw: bytes, label: str, why: str) -> None:
        """Counts it each time it is read, says it once."""
        self._metrics.refused.labels(label).inc()
        if self._refused_before.get(key) != raw[:64] and len(self._refused_before) < MAX_WORKERS:
            self._refused_before[key] = raw[:64]
            log.warning("record refused", key=key.decode(errors="replace")[:80], why=why)

    async def _lease_gone(self, worker_id: str) -> None:
        link = self._fleet.links.get(worker_id)
        if link is not None and link.session is None:
            self._mirrors.drop(worker_id)
            await self._fleet.remove(worker_id)

    def _follow_sessions(self) -> None:
        """A live stream says which incarnation counts; a record may be older."""
        for session in self._fleet.sessions():
            self._mirrors.follow(session.worker_id, session.info.incarnation)

    # --- what they hold -----------------------------------------------------------------------

    async def follow_events(self) -> None:
        """One round: due snapshots, then the next events."""
        if self._position is None:
            self._position = await self._reader.stream_position()
        now = asyncio.get_running_loop().time()
        for worker_id, mirror in list(self._mirrors.workers.items()):
            if mirror.needs_snapshot and now >= mirror.snapshot_after:
                await self._take_snapshot(worker_id, mirror)
        entries = await self._reader.events(self._position)
        for entry_id, fields in entries:
            self._position = entry_id
            self._take_event(fields)
            await asyncio.sleep(0)
        if not entries and _order(await self._reader.stream_position()) < _order(self._position):
            self._position = STREAM_START  # another Redis, or one that was emptied

    def _take_event(self, fields: dict[bytes, bytes]) -> None:
        try:
            event = parse_event(fields)
            if mirror := self._mirrors.find(event):
                mirror.apply(event)
        except RefusedRecord as refused:
            self._metrics.refused.labels(str(refused)).inc()
        except Diverged:
            self._metrics.diverged.inc()

    async def _take_snapshot(self, worker_id: str, mirror: WorkerMirror) -> None:
        mirror.snapshot_after = asyncio.get_running_loop().time() + SNAPSHOT_PAUSE_S
        self._metrics.resyncs.inc()
        try:
            await self._read_snapshot(worker_id, mirror)
        except RefusedRecord as refused:
            self._metrics.refused.labels(str(refused)).inc()
            mirror.drop()
            mirror.needs_snapshot = True
            mirror.snapshot_after += 10 * SNAPSHOT_PAUSE_S

    async def _read_snapshot(self, worker_id: str, mirror: WorkerMirror) -> None:
        mirror.begin_snapshot(await self._sequence(worker_id, mirror))
        num_keys = 0
        try:
            async for members in self._reader.members(worker_id, mirror.incarnation):
                num_keys += len(members)
                if num_keys > self._mirrors.index.max_keys:
                    raise RefusedRecord("keys_size")
                if num_refused := mirror.add(members):
                    self._metrics.refused.labels("key_form").inc(num_refused)
            mirror.end_snapshot(await self._sequence(worker_id, mirror))
        except (RedisError, OSError, TimeoutError):
            mirror.needs_snapshot = True
            raise

    async def _sequence(self, worker_id: str, mirror: WorkerMirror) -> int | None:
        raw = (await self._reader.sequences([(worker_id, mirror.incarnation)]))[0]
        return None if raw is None else parse_sequence(raw)

    async def _check_lag(self) -> None:
        """A mirror whose number stands still below (or above) the worker's missed something."""
        mirrors = list(self._mirrors.workers.items())
        names = [(worker_id, mirror.incarnation) for worker_id, mirror in mirrors]
        for (_, mirror), raw in zip(mirrors, await self._reader.sequences(names), strict=True):
            if raw is None or mirror.needs_snapshot:
                continue
            try:
                behind = parse_sequence(raw) != mirror.last_sequence
            except RefusedRecord as refused:
                self._metrics.refused.labels(str(refused)).inc()
                continue
            if behind and mirror.lagging_at == (mirror.last_sequence or 0):
                mirror.needs_snapshot = True
            mirror.lagging_at = (mirror.last_sequence or 0) if behind else None


def _order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number or 0)
