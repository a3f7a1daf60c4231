"""The transports of one incarnation: what exports its pool, and how links to peers are made."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.errors import IncompatiblePeer
from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import LocalPool, Reader, Source, TransportSettings
from paceline.kv_transfer.layout_map import LayoutMap, WorkerLayout
from paceline.kv_transfer.link_statistics import LinkStatistics
from paceline.kv_transfer.multi import MultiLink, MultiReader, export
from paceline.kv_transfer.uneven_pull import RankSource, UnevenPull, staging_pool
from paceline.v1 import kv_pb2
from paceline.worker.config import WorkerConfig
from paceline.worker.rank_messages import RankReady
from paceline.worker.rank_process import RankProcess
from paceline.worker.rank_reader import RankReader
from paceline.worker.uneven import described_layout, own_layout

Addresses = list[tuple[str, bytes]]  # of sources, by transport
MakeReader = Callable[[str], Reader]


@dataclass(frozen=True, slots=True)
class OwnPools:
    """Pools of ours, one a rank, into which this process copies."""

    layout: WorkerLayout
    ranks: Sequence[LocalPool]
    make_reader: Callable[[str, LocalPool], Reader]  # into another pool


@dataclass(frozen=True, slots=True, eq=False)
class Reached:
    """A source that a link reaches. `uneven` is for one whose layout is not ours; `scratch`: a page
    where what the link brings is wanted by nobody, where ours have one."""

    link: MultiLink
    statistics: LinkStatistics
    uneven: UnevenPull | None = None
    scratch: int | None = None
    reader: MultiReader | None = None  # of its own

    def close(self) -> None:
        self.link.close()
        if self.reader is not None:
            self.reader.close()


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
        own: OwnPools | None = None,
    ) -> None:
        self.group = group
        self._names = names
        self._own = own
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
        return _connect(self._reader, description, timeout_s)

    def plan(self, description: kv_pb2.DescribeResponse, layout_digest: str) -> LayoutMap | None:
        """How pages of this source become ours, whose layout digest that is; None: they are alike.

        Raises IncompatiblePeer, naming the field, where they never can be."""
        is_alike = description.layout_digest == layout_digest
        if self._own is None:
            if is_alike:
                return None
            reason = "layout_digest: the source's is another, and our pool is on a device"
            raise IncompatiblePeer(reason, field="layout_digest")
        if is_alike and len(self._own.ranks) == 1:
            return None
        return LayoutMap(described_layout(description), self._own.layout)

    def reach(
        self, description: kv_pb2.DescribeResponse, layouts: LayoutMap | None, timeout_s: float
    ) -> Reached:
        """`connect`, by what `plan` has found. Raises what that raises."""
        if layouts is None:
            return Reached(self.connect(description, timeout_s), LinkStatistics(self.group))
        own = self._own
        assert own is not None
        staging = staging_pool(layouts.source)
        reader = MultiReader(self._names, lambda name: own.make_reader(name, staging))
        try:
            link = _connect(reader, description, timeout_s)
        except BaseException:
            reader.close()
            raise
        num_staged = staging.num_pages // len(description.ranks)
        sources = [
            RankSource(link, staging, num_staged, rank.first_page, i * num_staged)
            for i, rank in enumerate(description.ranks)
        ]
        pull = UnevenPull(layouts, sources, own.ranks)
        scratch = staging.num_pages - 1
        return Reached(link, LinkStatistics(staging.group), pull, scratch, reader)

    def close(self) -> None:
        """Links must be closed before."""
        for source in self._sources:
            source.close()
        self._reader.close()
        for pool in self._own.ranks if self._own is not None else ():
            with contextlib.suppress(BufferError):  # what still refers to it waits for a collection
                pool.memory.release()  # else the whole pool would wait, which is freed after this


def make_connectors(config: WorkerConfig, rank: RankProcess) -> Connectors:
    """Starts the sources, unless the rank has. Raises ConfigError for a transport that cannot be
    had."""
    ready, pool = rank.ready, rank.local_pool()
    names = registry.names_of(config.links.transports, on_device=pool is None, tls=config.tls)
    if pool is not None:
        settings = TransportSettings(
            incarnation=rank.incarnation,
            host=config.host,
            advertised_host=config.advertise_host,
            secret=config.secret.encode(),
            tls=config.tls,
        )
        return host_connectors(names, pool, settings, ready)
    return Connectors(
        names,
        ready.groups[0],
        lambda name: RankReader(name, rank.link_calls, ready.groups[0], ready.num_all_pages),
        list(ready.addresses),
    )


def host_connectors(
    names: Sequence[str], pool: LocalPool, settings: TransportSettings, ready: RankReady
) -> Connectors:
    """Over pools of all ranks that this process maps as one."""
    source = export(names, pool, settings)
    source.start()
    return Connectors(
        names,
        pool.group,
        lambda name: registry.make_reader(name, pool, settings),
        list(source.addresses().items()),
        (source,),
        OwnPools(
            own_layout(ready),
            pools_by_rank(pool, len(ready.ranks)),
            lambda name, other: registry.make_reader(name, other, settings),
        ),
    )


def pools_by_rank(pool: LocalPool, num_ranks: int) -> list[LocalPool]:
    """`pool` holds those of all ranks, one after the other."""
    num_pages = pool.num_pages // num_ranks
    size = num_pages * pool.group.page_bytes
    return [
        LocalPool(pool.memory[rank * size : (rank + 1) * size], pool.group, num_pages)
        for rank in range(num_ranks)
    ]


def _connect(
    reader: MultiReader, description: kv_pb2.DescribeResponse, timeout_s: float
) -> MultiLink:
    offered = {item.name: item.address for item in description.transports}
    return reader.connect_to(offered, timeout_s, description.worker_id)
