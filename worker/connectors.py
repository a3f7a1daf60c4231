"""The transports of one incarnation: what exports its pool, and how links to peers are made."""

from collections.abc import Callable, Sequence

from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import LocalPool, Reader, Source, TransportSettings
from paceline.kv_transfer.multi import MultiLink, MultiReader, export
from paceline.v1 import kv_pb2
from paceline.worker.config import WorkerConfig
from paceline.worker.rank_process import RankProcess
from paceline.worker.rank_reader import RankReader

Addresses = list[tuple[str, bytes]]  # of sources, by transport
MakeReader = Callable[[str], Reader]


class Connectors:
    """Where sources of this pool answer, and readers into it. `connect` and `close` block.

    `names`: transports to read with, best first; `sources`: those that are closed with this.
    """

    def __init__(
        self,
        names: Sequence[str],
        group: PageGroup,
        make_reader: MakeReader,
        addresses: Addresses,
        sources: Sequence[Source] = (),
    ) -> None:
        self.group = group
        self._reader = MultiReader(names, make_reader)
        self._addresses = addresses
        self._sources = sources

    def addresses(self) -> Addresses:
        return self._addresses

    def connect(self, description: kv_pb2.DescribeResponse, timeout_s: float) -> MultiLink:
        """By the best transport that reaches this peer, within `timeout_s` in all.

        Raises, with a reason for each, PeerGone if one of them might have reached it, else
        IncompatiblePeer.
        """
        offered = {item.name: item.address for item in description.transports}
        return self._reader.connect_to(offered, timeout_s, description.worker_id)

    def close(self) -> None:
        """Links must be closed before."""
        for source in self._sources:
            source.close()
        self._reader.close()


def make_connectors(config: WorkerConfig, rank: RankProcess) -> Connectors:
    """Starts the sources, unless the rank has. Raises ConfigError for a transport that cannot be
    had."""
    ready, pool = rank.ready, rank.local_pool()
    names = registry.names_of(config.transports, on_device=pool is None, tls=config.tls)
    if pool is not None:
        settings = TransportSettings(
            incarnation=rank.incarnation,
            host=config.host,
            advertised_host=config.advertise_host,
            secret=config.secret.encode(),
            tls=config.tls,
        )
        return host_connectors(names, pool, settings)
    return Connectors(
        names,
        ready.groups[0],
        lambda name: RankReader(name, rank.link_calls, ready.groups[0], ready.num_all_pages),
        list(ready.addresses),
    )


def host_connectors(
    names: Sequence[str], pool: LocalPool, settings: TransportSettings
) -> Connectors:
    """Over a pool that this process maps."""
    source = export(names, pool, settings)
    source.start()
    return Connectors(
        names,
        pool.group,
        lambda name: registry.make_reader(name, pool, settings),
        list(source.addresses().items()),
        (source,),
    )
