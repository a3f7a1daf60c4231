"""What workers hold: their events and key sets in Redis, which keep the mirrors."""

import asyncio
from collections.abc import Callable

from redis.exceptions import RedisError

from paceline.router.metrics import RouterMetrics
from paceline.router.mirror import (
    Diverged,
    MirrorSet,
    RefusedRecord,
    WorkerMirror,
    parse_event,
    parse_sequence,
)
from paceline.router.redis_reader import RedisReader
from paceline.rpc.redis_schema import Kind

SNAPSHOT_PAUSE_S = 1.0  # between two snapshots of one worker
STREAM_START = b"0-0"


class HeldKeys:
    """`follow` without end, and now and then look whether something was missed: `check_lag`.

    `on_stranger` is called when a worker begins to tell that no mirror follows."""

    def __init__(
        self,
        reader: RedisReader,
        mirrors: MirrorSet,
        metrics: RouterMetrics,
        on_stranger: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._mirrors = mirrors
        self._metrics = metrics
        self._on_stranger = on_stranger
        self._position: bytes | None = None

    async def follow(self) -> None:
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
            elif event.kind == Kind.CLEARED:
                self._on_stranger()
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

    async def check_lag(self) -> None:
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
