"""Follows Redis: finds workers, keeps the mirrors of what they hold. Redis is a hint.

While it is down, paused, empty or full of junk, everything here waits or refuses, and routing goes
on with what is known and with the workers' own streams.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import structlog
from redis.exceptions import RedisError, ResponseError

from paceline.router.fleet import Fleet
from paceline.router.held_keys import HeldKeys
from paceline.router.metrics import RouterMetrics
from paceline.router.mirror import MirrorSet
from paceline.router.redis_reader import RedisReader
from paceline.router.worker_records import WorkerRecords

DISCOVER_S = 1.0  # between two looks at all records, unless a new worker tells of itself
PAUSE_S = 0.05  # between two looks, whoever tells
CHECK_LAG_S = 1.0
BACKOFF_S = (0.05, 0.25)  # first and longest pause after Redis failed

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
        self._stranger = asyncio.Event()
        self._held_keys = HeldKeys(reader, mirrors, metrics, self._stranger.set)
        self.is_up = False
        self.looked = asyncio.Event()  # once, at all records

    async def run(self) -> None:
        """Until cancelled."""
        await asyncio.gather(
            self._repeat(self.discover, self._until_stranger),
            self._repeat(self._held_keys.follow, partial(asyncio.sleep, 0)),
            self._repeat(self._held_keys.check_lag, partial(asyncio.sleep, CHECK_LAG_S)),
        )

    async def _repeat(
        self, round_: Callable[[], Awaitable[None]], rest: Callable[[], Awaitable[None]]
    ) -> None:
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
                await rest()

    async def _until_stranger(self) -> None:
        await asyncio.sleep(PAUSE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCOVER_S - PAUSE_S):
                await self._stranger.wait()

    def _note_state(self, up: bool, why: str = "") -> None:
        if up and not self.is_up:
            log.info("redis answers")
        elif self.is_up and not up:
            log.warning("redis does not answer; routing goes on without it", why=why)
        self.is_up = up
        self._metrics.redis_up.set(up)

    async def discover(self) -> None:
        self._stranger.clear()
        await self._records.read()
        self.looked.set()
        self._follow_sessions()

    def _follow_sessions(self) -> None:
        """A live stream says which incarnation counts; a record may be older."""
        for session in self._fleet.sessions():
            self._mirrors.follow(session.worker_id, session.info.incarnation)
