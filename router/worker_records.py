"""Who is there: the records of workers in Redis, and what is refused of them."""

import structlog

from paceline.core.errors import InvalidRequest
from paceline.router.fleet import Fleet
from paceline.router.metrics import RouterMetrics
from paceline.router.mirror import MirrorSet
from paceline.router.redis_reader import MAX_WORKERS, RedisReader
from paceline.rpc import records, redis_schema

_WORKER_PREFIX = redis_schema.WORKER_PREFIX.encode()

log = structlog.stdlib.get_logger("paceline.router")


class WorkerRecords:
    """`read` them again and again: links of the fleet and mirrors follow."""

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
        self._refused_before: dict[bytes, bytes] = {}

    async def read(self) -> None:
        """All of them, once."""
        known = {_WORKER_PREFIX + worker_id.encode() for worker_id in self._fleet.links}
        found = await self._reader.worker_keys()
        keys = [*known, *(found - known)][:MAX_WORKERS]
        for key, raw in zip(keys, await self._reader.values(keys), strict=True):
            worker_id = key.removeprefix(_WORKER_PREFIX).decode(errors="replace")
            if raw is None or not self._take_record(key, worker_id, raw):
                await self._lease_gone(worker_id)

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
