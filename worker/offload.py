"""Copies what the pool commits into the first tier, in the background.

Pages are pinned while they are copied, a few at a time, as for any reader. What cannot keep up is
dropped: it costs a hit later.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import structlog

from paceline.core.errors import PacelineError
from paceline.engine import messages
from paceline.engine.messages import PinnedPage
from paceline.kv_transfer.tiers.base import PageBatch, PageName

if TYPE_CHECKING:
    from paceline.worker.tiering import Tiering

MAX_WAITING_BLOCKS = 1 << 16
BATCH_BLOCKS = 32  # pinned at once

_log = structlog.get_logger("paceline.worker")


class Offload:
    """`add` keys that the pool has committed; a task takes them in order."""

    def __init__(self, tiering: "Tiering") -> None:
        self._tiering = tiering
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING_BLOCKS)
        self._wake = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def add(self, keys: Sequence[bytes]) -> None:
        self._waiting.extend(keys)
        self._wake.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            num_blocks = min(len(self._waiting), BATCH_BLOCKS)
            keys = [self._waiting.popleft() for _ in range(num_blocks)]
            if not keys:
                self._wake.clear()
                continue
            try:
                await self._offload(keys)
            except PacelineError:
                return  # the rank is gone
            except Exception:  # costs these pages, not all later ones
                _log.exception("pages could not be offloaded for a reason of ours")

    async def _offload(self, keys: Sequence[bytes]) -> None:
        tiering = self._tiering
        link = tiering.session.rank.link
        first = tiering.stack.tiers[0]
        names = [
            PageName(key, group)
            for key in keys
            for group in range(len(tiering.session.rank.ready.groups))
            if not first.holds(PageName(key, group))
        ]
        runs = [messages.KeyRun(name.group, [name.key]) for name in names]
        pinned = await link.call(messages.Pin(runs)) if runs else messages.Pinned([])
        assert isinstance(pinned, messages.Pinned)
        try:
            found = [(name, run[0]) for name, run in zip(names, pinned.runs, strict=True) if run]
            if found:
                await self._put(found)
        finally:
            tiering.session.unpin([(page.page, page.generation) for page in pinned.pages])

    async def _put(self, found: Sequence[tuple[PageName, PinnedPage]]) -> None:
        tiering = self._tiering
        batch = PageBatch(
            names=[name for name, _ in found],
            memory=tiering.pool.memory,
            pages=np.array([page.page for _, page in found], np.int64),
            checksums=np.array([page.checksums for _, page in found], np.uint64),
        )
        loop = asyncio.get_running_loop()
        copy = loop.run_in_executor(tiering.offload_thread, tiering.stack.put, batch)
        try:
            wrong = await asyncio.shield(copy)
        except asyncio.CancelledError:
            await asyncio.wait((copy,))  # pages stay pinned as long as they are read
            raise
        for row in wrong.tolist():
            page = found[row][1]
            await tiering.session.rank.link.call(messages.Recheck(page.page, page.generation))
