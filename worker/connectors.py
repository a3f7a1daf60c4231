"""The transports of one incarnation: what exports its pool, and how links to peers are made."""

import time
from collections.abc import Sequence

import structlog

from paceline.core.errors import IncompatiblePeer, PacelineError, PeerGone
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import Link, LocalPool, Source, TransportSettings
from paceline.v1 import kv_pb2
from paceline.worker.config import WorkerConfig
from paceline.worker.rank_process import RankProcess

_log = structlog.get_logger("paceline.worker")


class Connectors:
    """Sources that run, and readers into the same pool. `connect` and `close` block."""

    def __init__(
        self,
        transports: Sequence[str],
        pool: LocalPool | None,
        settings: TransportSettings,
        sources: Sequence[Source],
    ) -> None:
        self.pool = pool
        self._transports = transports
        self._settings = settings
        self._sources = sources

    def addresses(self) -> list[tuple[str, bytes]]:
        return [(source.transport, source.address()) for source in self._sources]

    def connect(self, description: kv_pb2.DescribeResponse, timeout_s: float) -> Link:
        """By the first of our transports that reaches this peer, within `timeout_s` in all.

        Raises, with a reason for each, PeerGone if one of them might have reached it, else
        IncompatiblePeer.
        """
        if self.pool is None:
            raise IncompatiblePeer("pools on a device are not read yet", field="transport")
        deadline = time.monotonic() + timeout_s
        offered = {item.name: item.address for item in description.transports}
        reasons: list[str] = []
        kind: type[PacelineError] = IncompatiblePeer
        for name in registry.names_of(self._transports):
            reason = registry.why_not(name, offered)
            if not reason:
                try:
                    reader = registry.make_reader(name, self.pool, self._settings)
                    return reader.connect(offered[name], max(0.1, deadline - time.monotonic()))
                except (PeerGone, IncompatiblePeer) as error:
                    reason = error.message
                    kind = PeerGone if isinstance(error, PeerGone) else kind
                    source = description.worker_id
                    _log.warning("a transport failed", name=name, source=source, reason=reason)
            reasons.append(f"{name}: {reason}")
        raise kind("no transport reaches the source: " + "; ".join(reasons), field="transport")

    def close(self) -> None:
        for source in self._sources:
            source.close()


def make_connectors(config: WorkerConfig, rank: RankProcess) -> Connectors:
    """Starts the sources. Raises ConfigError for a transport that cannot be had."""
    settings = TransportSettings(
        incarnation=rank.incarnation,
        host=config.host,
        advertised_host=config.advertise_host,
        secret=config.secret.encode(),
    )
    names = registry.names_of(config.transports)
    sources: list[Source] = []
    pool = rank.local_pool()
    try:
        for name in names if pool is not None else ():
            assert pool is not None
            source = registry.make_source(name, pool, settings)
            source.start()
            sources.append(source)
    except BaseException:
        for source in sources:
            source.close()
        raise
    return Connectors(config.transports, pool, settings, sources)
