"""The transports of one incarnation: what exports its pool, and how links to peers are made."""

from collections.abc import Sequence

from paceline.core.errors import IncompatiblePeer
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import Link, LocalPool, Source, TransportSettings
from paceline.v1 import kv_pb2
from paceline.worker.config import WorkerConfig
from paceline.worker.rank_process import RankProcess


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
        """The first of our transports that reaches this peer.

        Raises IncompatiblePeer, with a reason for each, when none does; PeerGone.
        """
        if self.pool is None:
            raise IncompatiblePeer("pools on a device are not read yet", field="transport")
        offered = {item.name: item.address for item in description.transports}
        reasons: list[str] = []
        for transport in self._transports:
            try:
                choice = registry.choose(transport, offered)
            except IncompatiblePeer as error:
                reasons.append(error.message)
                continue
            reader = registry.make_reader(choice.name, self.pool, self._settings)
            return reader.connect(choice.address, timeout_s)
        raise IncompatiblePeer("; ".join(reasons), field="transport")

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
    names = [name for kind in config.transports for name in registry.source_names(kind)]
    sources: list[Source] = []
    pool = rank.local_pool()
    try:
        for name in dict.fromkeys(names) if pool is not None else ():
            assert pool is not None
            source = registry.make_source(name, pool, settings)
            source.start()
            sources.append(source)
    except BaseException:
        for source in sources:
            source.close()
        raise
    return Connectors(config.transports, pool, settings, sources)
