"""Sources that this worker reads from: one handshake and one link for each incarnation.

Keyed by (worker id, incarnation), never by address: what restarts behind an address is new.
"""

import asyncio
from dataclasses import dataclass

import grpc

from paceline.core.errors import IncompatiblePeer, KvUnavailable, PeerGone
from paceline.kv_transfer.base import Link
from paceline.kv_transfer.link_statistics import LinkFigures, LinkStatistics
from paceline.rpc.channel import connect
from paceline.rpc.status import error_of
from paceline.v1 import common_pb2, kv_pb2, kv_pb2_grpc, worker_pb2
from paceline.worker.config import WorkerConfig
from paceline.worker.connectors import Connectors
from paceline.worker.lease_beats import LeaseBeats

PeerKey = tuple[str, str]  # worker id, incarnation

MAX_PEERS = 256
CONNECT_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 3.0
FORGET_AFTER = 10  # times the silence that ends leases


@dataclass(slots=True, eq=False)
class Peer:
    """A source in reach. `stub` and `beats` speak to its KvTransferService, `link` copies."""

    key: PeerKey
    channel: grpc.aio.Channel
    stub: kv_pb2_grpc.KvTransferServiceStub
    link: Link
    beats: LeaseBeats
    statistics: LinkStatistics
    reported: LinkFigures

    def take_figures(self) -> LinkFigures:
        """What the link has done since the last call."""
        now, before = self.statistics.figures, self.reported
        self.reported = now
        return LinkFigures(
            num_bytes=now.num_bytes - before.num_bytes,
            num_pieces=now.num_pieces - before.num_pieces,
            num_mismatches=now.num_mismatches - before.num_mismatches,
            seconds=now.seconds - before.seconds,
            bytes_per_second=now.bytes_per_second,
        )

    async def unpin(self, request: kv_pb2.UnpinRequest) -> None:
        await self.stub.Unpin(request, timeout=CALL_TIMEOUT_S)

    async def report(self, request: kv_pb2.ReportRequest) -> None:
        await self.stub.Report(request, timeout=CALL_TIMEOUT_S)

    async def close(self) -> None:
        await asyncio.to_thread(self.beats.close)
        await asyncio.to_thread(self.link.close)
        await self.channel.close(None)


class PeerDirectory:
    def __init__(
        self, config: WorkerConfig, info: worker_pb2.WorkerInfo, connectors: Connectors
    ) -> None:
        self._config = config
        self._info = info
        self._connectors = connectors
        self._peers: dict[PeerKey, asyncio.Task[Peer]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, ticket: common_pb2.Ticket, endpoint: str) -> Peer:
        """The ticket's source, connected. Raises PeerGone or IncompatiblePeer."""
        key = (ticket.source_worker, ticket.source_incarnation)
        task = self._peers.get(key)
        if task is None:
            self._make_room(key)
            task = self._peers[key] = asyncio.create_task(self._connect(key, endpoint))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._peers.get(key) is task:
                del self._peers[key]  # the next one tries anew
            raise

    def forget(self, peer: Peer) -> None:
        """Its link has failed: whoever comes next makes a new handshake."""
        if self._peers.pop(peer.key, None) is not None:
            self._close_later(peer)

    def sweep(self) -> None:
        """Forgets peers that have been gone for long."""
        limit_s = FORGET_AFTER * self._config.silence_s
        for peer in [peer for task in self._peers.values() if (peer := _made(task))]:
            if peer.beats.unanswered_s > limit_s:
                self.forget(peer)

    async def close(self) -> None:
        for task in self._peers.values():
            task.cancel()
        done = await asyncio.gather(*self._peers.values(), return_exceptions=True)
        self._peers.clear()
        for peer in done:
            if isinstance(peer, Peer):
                self._close_later(peer)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _make_room(self, key: PeerKey) -> None:
        """Drops older incarnations of the same worker, and the oldest peer at the bound."""
        stale = [known for known in self._peers if known[0] == key[0]]
        if len(self._peers) - len(stale) >= MAX_PEERS:
            stale.append(next(iter(self._peers)))
        for known in stale:
            task = self._peers.pop(known)
            task.cancel()
            peer = _made(task)
            if peer is not None:
                self._close_later(peer)

    def _close_later(self, peer: Peer) -> None:
        task = asyncio.create_task(peer.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _connect(self, key: PeerKey, endpoint: str) -> Peer:
        channel = connect(endpoint)
        try:
            stub = kv_pb2_grpc.KvTransferServiceStub(channel)  # type: ignore[no-untyped-call]
            description = await self._describe(stub)
            if (description.worker_id, description.incarnation) != key:
                raise PeerGone("another worker or incarnation answers at the source's address")
            if description.content_digest != self._info.content_digest:
                raise IncompatiblePeer("content_digest differs", field="content_digest")
            link = await asyncio.to_thread(self._connectors.connect, description, CONNECT_TIMEOUT_S)
        except BaseException:
            await channel.close(None)
            raise
        reader = (self._info.worker_id, self._info.incarnation)
        beats = LeaseBeats(endpoint, reader, self._config.beat_s, self._config.silence_s)
        beats.start()
        assert self._connectors.pool is not None
        statistics = LinkStatistics(self._connectors.pool.group)
        return Peer(key, channel, stub, link, beats, statistics, statistics.figures)

    async def _describe(self, stub: kv_pb2_grpc.KvTransferServiceStub) -> kv_pb2.DescribeResponse:
        request = kv_pb2.DescribeRequest(
            reader_worker=self._info.worker_id,
            reader_incarnation=self._info.incarnation,
            content_digest=self._info.content_digest,
            layout_digest=self._info.layout_digest,
        )
        try:
            answer: kv_pb2.DescribeResponse = await stub.Describe(
                request, timeout=CONNECT_TIMEOUT_S
            )
            return answer
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure)
            if isinstance(error, IncompatiblePeer | KvUnavailable):
                raise error from None
            raise PeerGone(error.message) from None


def _made(task: asyncio.Task[Peer]) -> Peer | None:
    """The peer, if connecting has succeeded."""
    failed = not task.done() or task.cancelled() or task.exception() is not None
    return None if failed else task.result()
