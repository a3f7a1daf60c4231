"""Meets other workers soon after they have registered: links are made, checked and measured before
a request needs them. Without Redis a link is made for the first request that needs it.
"""

import asyncio
import contextlib
import random
import time
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from paceline.core.errors import InvalidRequest, PacelineError
from paceline.rpc import records
from paceline.rpc.redis_schema import WORKER_PREFIX
from paceline.v1 import worker_pb2
from paceline.worker.config import WorkerConfig
from paceline.worker.peers import PeerDirectory
from paceline.worker.quarantine import PeerKey

MAX_MET = 32  # links that are made ahead: each has a beat a second
MAX_RECORDS = 1024  # looked at a round
MAX_AT_ONCE = 2
PERIOD_BEATS = 2
AGAIN_S = 30.0  # after a try that failed
TIMEOUT_S = 1.0


class Introductions:
    """Of one incarnation, `info`. `run` goes on until it is cancelled."""

    def __init__(
        self, config: WorkerConfig, info: worker_pb2.WorkerInfo, peers: PeerDirectory
    ) -> None:
        self._config = config
        self._secret = config.secret.encode()
        self._info = info
        self._peers = peers
        self._tried: dict[PeerKey, float] = {}
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(self) -> None:
        if not self._config.redis_url:
            return
        while True:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with self._client() as client:
                    while True:
                        await self._round(client)
                        await asyncio.sleep(PERIOD_BEATS * self._config.timers.beat_s)
            await asyncio.sleep(PERIOD_BEATS * self._config.timers.beat_s)

    def _client(self) -> Any:  # typed for str answers, these are bytes
        return redis.asyncio.from_url(
            self._config.redis_url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=None,
            single_connection_client=True,
        )

    async def _round(self, client: Any) -> None:
        """All whom we do not know yet, as far as there is room."""
        now = time.monotonic()
        self._tried = {k: tried for k, tried in self._tried.items() if tried > now - AGAIN_S}
        found = [info for info in await self._registered(client) if self._is_new(info)]
        room = max(0, MAX_MET - len(self._peers.connected()))
        chosen = random.sample(found, min(room, len(found)))
        await asyncio.gather(*map(self._meet, chosen))

    async def _registered(self, client: Any) -> list[worker_pb2.WorkerInfo]:
        names: list[bytes] = []
        async for name in client.scan_iter(match=WORKER_PREFIX + "*", count=512):
            names.append(name)
            if len(names) >= MAX_RECORDS:
                break
        async with client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.getrange(name, 0, records.MAX_RECORD_BYTES)
            answers = await pipe.execute(raise_on_error=False) if names else []
        found = []
        for answer in answers:
            if not isinstance(answer, ResponseError):  # of another type
                with contextlib.suppress(InvalidRequest):
                    found.append(records.parse(answer, self._secret))
        return found

    def _is_new(self, info: worker_pb2.WorkerInfo) -> bool:
        key = (info.worker_id, info.incarnation)
        is_like_us = info.content_digest == self._info.content_digest
        is_other = info.worker_id != self._info.worker_id
        return is_like_us and is_other and key not in self._tried and not self._peers.knows(key)

    async def _meet(self, info: worker_pb2.WorkerInfo) -> None:
        key = (info.worker_id, info.incarnation)
        self._tried[key] = time.monotonic()
        async with self._turns:
            with contextlib.suppress(PacelineError):  # told of in the log, or by its next request
                await self._peers.meet(key, info.endpoint)
