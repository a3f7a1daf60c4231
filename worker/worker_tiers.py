"""The tiers of a worker, over all incarnations of its rank.

They outlive a rank, as long as the pages of the next one are of the same form. Where they are not
(its model was replaced meanwhile), tiers are made anew: what they hold means nothing any more.
"""

import asyncio

import structlog
from prometheus_client import CollectorRegistry

from paceline.core.errors import ConfigError
from paceline.kv_transfer.tiers.config import PageShape, load_tiers, make_tiers
from paceline.kv_transfer.tiers.stack import TierStack
from paceline.worker.config import WorkerConfig
from paceline.worker.rank_messages import RankReady
from paceline.worker.redis_record import RedisRecord
from paceline.worker.tier_events import TierEvents
from paceline.worker.tier_metrics import TierMetrics

_log = structlog.get_logger("paceline.worker")


class WorkerTiers:
    """`open` for the first rank, `reopen` for each that follows, before it serves; `close`."""

    def __init__(
        self, config: WorkerConfig, record: RedisRecord, registry: CollectorRegistry
    ) -> None:
        self.stack: TierStack | None = None
        self._config = config
        self._record = record
        self._registry = registry
        self._shape: PageShape | None = None
        self._metrics: TierMetrics | None = None

    async def open(self, ready: RankReady) -> None:
        """May take seconds. Raises ConfigError for tiers that cannot be had."""
        configs = load_tiers(self._config.tiers)
        if not configs:
            return
        num_ranks = len(ready.ranks)
        reason = f"are of one rank, the model's pages of {num_ranks}"
        ConfigError.check("tiers", str(self._config.tiers), num_ranks == 1, reason)
        shape = self._shape_of(ready)
        tiers = await asyncio.to_thread(make_tiers, configs, shape)
        events = TierEvents(asyncio.get_running_loop(), self._record.add)
        self.stack = await asyncio.to_thread(TierStack, tiers, events)
        self._shape = shape
        self._metrics = TierMetrics(tiers)
        self._registry.register(self._metrics)

    async def reopen(self, ready: RankReady) -> None:
        """Changes nothing if they fit. Without tiers that cannot be had any more the rank serves
        all the same."""
        if self._shape == self._shape_of(ready):
            return
        if self.stack is not None:
            _log.warning("tiers are made anew: pages are of another form")
        await self.close()
        self._record.forget_tiers()
        try:
            await self.open(ready)
        except ConfigError as error:
            _log.error("tiers cannot be had", reason=error.message)

    async def close(self) -> None:
        if self._metrics is not None:
            self._registry.unregister(self._metrics)
        if self.stack is not None:
            await asyncio.to_thread(self.stack.close)
        self.stack = self._metrics = self._shape = None

    def _shape_of(self, ready: RankReady) -> PageShape:
        return PageShape(ready.groups[0], ready.layout_digest, self._config.worker_id)
