"""Sources that this worker reads from: one handshake and one link for each incarnation.

Keyed by (worker id, incarnation), never by address: what restarts behind an address is new.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import grpc

from paceline.core.errors import IncompatiblePeer, KvUnavailable, PacelineError, PeerGone
from paceline.kv_transfer.layout_map import LayoutMap
from paceline.kv_transfer.link_statistics import LinkFigures, LinkStatistics
from paceline.kv_transfer.multi import MultiLink
from paceline.kv_transfer.uneven_pull import UnevenPull
from paceline.rpc import caller_token
from paceline.rpc.status import error_of
from paceline.v1 import common_pb2, kv_pb2, kv_pb2_grpc, worker_pb2
from paceline.worker.config import WorkerConfig
from paceline.worker.connectors import Connectors, Reached
from paceline.worker.lease_beats import LeaseBeats
from paceline.worker.link_checks import LinkChecks, LinkSpeed
from paceline.worker.quarantine import PeerKey, Quarantine, Verdict
from paceline.worker.source_calls import SourceCalls

T = TypeVar("T")

MAX_PEERS = 256
MAX_CONNECTING = 16  # at once, each in a thread that a silent source holds for seconds
CONNECT_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 3.0
CANARY_BEATS = 30  # between two looks at a peer's canary
PIN_TIMEOUT_S = 2.0  # a request waits for it: it goes on elsewhere if the source is cut off
FORGET_AFTER = 10  # times the silence that ends leases


@dataclass(slots=True, eq=False)
class Peer:
    """A source in reach: its KvTransferService, the link that copies, the beats of our leases.

    Of its calls `pin` raises what the source answers, the others what gRPC raises.
    """

    key: PeerKey
    secret: bytes
    calls: SourceCalls
    reached: Reached
    beats: LeaseBeats
    reported: LinkFigures
    turns: asyncio.Semaphore  # of pulls from it
    description: kv_pb2.DescribeResponse
    compared: float  # when its canary was last looked at, on time.monotonic()
    speed: LinkSpeed | None = None  # by its self-test

    @property
    def link(self) -> MultiLink:
        return self.reached.link

    @property
    def statistics(self) -> LinkStatistics:
        return self.reached.statistics

    @property
    def uneven(self) -> UnevenPull | None:
        return self.reached.uneven

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

    def progress(
        self, ticket: common_pb2.Ticket, first_blocks: Sequence[int]
    ) -> "grpc.aio.UnaryStreamCall[kv_pb2.ProgressRequest, kv_pb2.ProgressEvent]":
        """Ends with the ticket at the latest. `first_blocks`: that we lack, by page group."""
        call: grpc.aio.UnaryStreamCall[kv_pb2.ProgressRequest, kv_pb2.ProgressEvent]
        ours = first_blocks if self.uneven is None else ()  # else its groups are not ours
        call = self.calls.stub.Progress(
            kv_pb2.ProgressRequest(ticket=ticket, first_blocks=ours),
            timeout=max(0.0, ticket.expires_unix_ms / 1000 - time.time()),
            metadata=caller_token.metadata(self.secret),
        )
        return call

    async def pin(self, request: kv_pb2.PinRequest) -> kv_pb2.PinResponse:
        metadata = caller_token.metadata(self.secret)
        try:
            pinned: kv_pb2.PinResponse = await self.calls.stub.Pin(
                request, timeout=PIN_TIMEOUT_S, metadata=metadata
            )
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from None
        return pinned

    async def unpin(self, request: kv_pb2.UnpinRequest) -> None:
        metadata = caller_token.metadata(self.secret)
        await self.calls.stub.Unpin(request, timeout=CALL_TIMEOUT_S, metadata=metadata)

    async def report(self, request: kv_pb2.ReportRequest) -> Verdict:
        """What the source says of a page that arrived wrong."""
        metadata = caller_token.metadata(self.secret)
        try:
            answer: kv_pb2.ReportResponse = await self.calls.stub.Report(
                request, timeout=CALL_TIMEOUT_S, metadata=metadata
            )
        except grpc.aio.AioRpcError:
            return Verdict.SILENT
        if answer.dropped:
            return Verdict.SOURCE
        return Verdict.LINK if answer.known else Verdict.GONE

    async def close(self, threads: Executor | None = None) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(threads, self.beats.close)
        await loop.run_in_executor(threads, self.reached.close)
        await self.calls.close()


class PeerDirectory:
    def __init__(
        self,
        config: WorkerConfig,
        info: worker_pb2.WorkerInfo,
        connectors: Connectors,
        checks: LinkChecks,
        content_parts: Mapping[str, str],
    ) -> None:
        self.checks = checks
        self._content_parts = content_parts
        self.quarantine = Quarantine()
        self._config = config
        self._secret = config.secret.encode()
        self._info = info
        self._connectors = connectors
        self._peers: dict[PeerKey, asyncio.Task[Peer]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(MAX_CONNECTING, thread_name_prefix="connect")

    async def get(self, ticket: common_pb2.Ticket, endpoint: str) -> Peer:
        """The ticket's source, connected. Raises PeerGone or IncompatiblePeer, KvUnavailable for
        one in quarantine."""
        return await self.meet((ticket.source_worker, ticket.source_incarnation), endpoint)

    async def meet(self, key: PeerKey, endpoint: str) -> Peer:
        """The same without a ticket."""
        self.checks.refuse_apart(key)
        self.quarantine.refuse(key)
        task = self._peers.get(key)
        if task is None:
            self._make_room()
            task = self._peers[key] = asyncio.create_task(self._connect(key, endpoint))
            task.add_done_callback(lambda done: self._connected(key, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                raise PeerGone("another incarnation of the source has its place") from None
            raise

    def knows(self, key: PeerKey) -> bool:
        return key in self._peers or self.checks.is_apart(key)

    def judge(self, peer: Peer, verdict: Verdict) -> None:
        """A page of it arrived wrong, and this is what it says of that."""
        if self.quarantine.judge(peer.key, verdict):
            self.forget(peer)

    def find(self, key: PeerKey) -> Peer | None:
        """One that is connected."""
        task = self._peers.get(key)
        return None if task is None else _made(task)

    def forget(self, peer: Peer) -> None:
        """Its link has failed: whoever comes next makes a new handshake."""
        task = self._peers.get(peer.key)
        if task is not None and _made(task) is peer:  # else a newer one has its place
            del self._peers[peer.key]
            self._close_later(peer)

    def connected(self) -> list[Peer]:
        return [peer for task in self._peers.values() if (peer := _made(task))]

    def fault_of(self, peer: Peer) -> str:
        """Why its link is reported; empty: it is as it should be."""
        reasons = [*peer.link.lost]
        if peer.speed is not None:
            reasons.append(self.checks.slowness(peer.speed))
        return "; ".join(filter(None, reasons))

    def details(self) -> list[str]:
        """What a probe for readiness shows of links that are not as they should be."""
        shown = [
            f"link from {peer.key[0]} by {peer.link.transport}: {fault}"
            for peer in self.connected()
            if (fault := self.fault_of(peer))
        ]
        apart = self.checks.apart.items()
        shown += [f"kept apart from {source}: {reason}" for (source, _), reason in apart]
        return shown + [f"in quarantine: {source}" for source, _ in self.quarantine.held()]

    def sweep(self) -> None:
        """Forgets peers that have been gone for long; looks at the canaries of others again. One
        that is silent would hold up those who come new for seconds: canaries come one by one."""
        period_s = CANARY_BEATS * self._config.timers.beat_s
        limit_s = FORGET_AFTER * self._config.timers.silence_s
        self.checks.forget_gone()
        for peer in self.connected():
            if peer.beats.unanswered_s > limit_s:
                self.forget(peer)
                continue
            if peer.calls.are_outdated:
                self._in_background(peer.calls.renew())
            is_silent = peer.beats.unanswered_s > self._config.timers.silence_s
            if peer.compared < time.monotonic() - period_s and not is_silent:
                peer.compared = time.monotonic()
                self._in_background(self._admit_again(peer))

    async def close(self) -> None:
        for task in self._peers.values():
            task.cancel()
        done = await asyncio.gather(*self._peers.values(), return_exceptions=True)
        self._peers.clear()
        for peer in done:
            if isinstance(peer, Peer):
                self._close_later(peer)
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _make_room(self) -> None:
        """Drops the oldest peer at the bound."""
        if len(self._peers) >= MAX_PEERS:
            self._drop(next(iter(self._peers)))

    def _drop_older(self, key: PeerKey) -> None:
        """Other incarnations of a worker that has answered as `key`. Not before: who is asked for
        may be an incarnation that is gone."""
        for known in [k for k in self._peers if k[0] == key[0] and k != key]:
            self._drop(known)

    def _drop(self, key: PeerKey) -> None:
        task = self._peers.pop(key)
        task.cancel()
        peer = _made(task)
        if peer is not None:
            self._close_later(peer)

    def _close_later(self, peer: Peer) -> None:
        self._in_background(peer.close(self._threads))

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _connected(self, key: PeerKey, task: asyncio.Task[Peer]) -> None:
        """Or not: then the next one tries anew, though nobody may have waited for this one."""
        if (task.cancelled() or task.exception()) and self._peers.get(key) is task:
            del self._peers[key]

    async def _connect(self, key: PeerKey, endpoint: str) -> Peer:
        calls = SourceCalls(endpoint, self._config.tls)
        try:
            description = await self._describe(calls.stub, key)
            if (description.worker_id, description.incarnation) != key:
                raise PeerGone("another worker or incarnation answers at the source's address")
            self._drop_older(key)
            layouts = self._plan(description)
        except IncompatiblePeer as error:
            self.checks.keep_apart(key, error)
            await calls.close()
            raise
        except BaseException:
            await calls.close()
            raise
        reached = None
        try:
            reached = await self._in_thread(
                lambda: self._connectors.reach(description, layouts, CONNECT_TIMEOUT_S)
            )
            await self._admit(key, description, reached)
        except BaseException:
            if reached is not None:
                await self._in_thread(reached.close)
            await calls.close()
            raise
        reader = (self._info.worker_id, self._info.incarnation)
        beats = LeaseBeats(endpoint, reader, self._config)
        beats.start()
        turns = asyncio.Semaphore(self._config.pulls_per_source)
        figures = reached.statistics.figures
        made = (calls, reached, beats, figures, turns, description, time.monotonic())
        peer = Peer(key, self._secret, *made)
        self._in_background(self._test(peer, description))
        return peer

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """One of ours: what else this process does in threads waits for no source."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _plan(self, description: kv_pb2.DescribeResponse) -> LayoutMap | None:
        """Before any byte moves. Raises IncompatiblePeer for a source that will never fit."""
        if description.content_digest != self._info.content_digest:
            raise IncompatiblePeer(
                "content_digest: the source's is another", field="content_digest"
            )
        return self._connectors.plan(description, self._info.layout_digest)

    async def _admit_again(self, peer: Peer) -> None:
        """KV that drifts apart, at either end or on the way, is noticed though every page arrives
        as it was promised."""
        try:
            await self._admit(peer.key, peer.description, peer.reached, again=True)
        except IncompatiblePeer:
            self.forget(peer)
        except PacelineError:  # the next pull will meet it, too
            return

    async def _admit(
        self,
        key: PeerKey,
        description: kv_pb2.DescribeResponse,
        reached: Reached,
        *,
        again: bool = False,
    ) -> None:
        try:
            await self.checks.admit(key, description, reached, again=again)
        except IncompatiblePeer as error:
            self.checks.keep_apart(key, error)
            raise

    async def _test(self, peer: Peer, description: kv_pb2.DescribeResponse) -> None:
        peer.speed = await self.checks.self_test(peer.key[0], description, peer.reached)

    async def _describe(
        self, stub: kv_pb2_grpc.KvTransferServiceStub, key: PeerKey
    ) -> kv_pb2.DescribeResponse:
        request = kv_pb2.DescribeRequest(
            reader_worker=self._info.worker_id,
            reader_incarnation=self._info.incarnation,
            content_digest=self._info.content_digest,
            layout_digest=self._info.layout_digest,
            content_parts=self._content_parts,
            source_incarnation=key[1],
        )
        try:
            answer: kv_pb2.DescribeResponse = await stub.Describe(
                request, timeout=CONNECT_TIMEOUT_S, metadata=caller_token.metadata(self._secret)
            )
            return answer
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure)
            is_meant = error.field != "source_incarnation"  # else its successor has answered
            if isinstance(error, IncompatiblePeer | KvUnavailable) and is_meant:
                raise error from None
            raise PeerGone(error.message) from None


def _made(task: asyncio.Task[Peer]) -> Peer | None:
    """The peer, if connecting has succeeded."""
    failed = not task.done() or task.cancelled() or task.exception() is not None
    return None if failed else task.result()
