"""Follows Redis: finds workers, keeps the mirrors of what they hold. Redis is a hint.

While it is down, paused, empty or full of junk, everything here waits or refuses, and routing goes
on with what is known and with the workers' own streams.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from redis.exceptions import RedisError, ResponseError

from paceline.router.fleet import Fleet
from paceline.router.held_keys import HeldKeys
from paceline.router.metrics import RouterMetrics
from paceline.router.mirror import MirrorSet
from paceline.router.redis_reader import RedisReader
from paceline.router.worker_records import WorkerRecords

DISCOVER_S = 1.0
BACKOFF_S = (0.1, 0.5)  # first and longest pause after Redis failed

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
        self._fleet = fleet
        self._mirrors = mirrors
        self._metrics = metrics
        self._records = WorkerRecords(reader, fleet, mirrors, metrics, secret)
        self._held_keys = HeldKeys(reader, mirrors, metrics)
        self.is_up = False
        self.looked = asyncio.Event()  # once, at all records

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(
            self._repeat(self.discover, DISCOVER_S),
            self._repeat(self._held_keys.follow, 0.0),
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

    async def discover(self) -> None:
        await self._records.read()
        self.looked.set()
        self._follow_sessions()
        await self._held_keys.check_lag()

    def _follow_sessions(self) -> None:
        """A live stream says which incarnation counts; a record may be older."""
        for session in self._fleet.sessions():
            self._mirrors.follow(session.worker_id, session.info.incarnation)
