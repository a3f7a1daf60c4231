"""Source side of KvTransferService: this worker's KV, by name, for readers under a lease."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import grpc
import structlog

from paceline.core.errors import IncompatiblePeer, InvalidRequest, KvUnavailable
from paceline.core.keys import KEY_BYTES
from paceline.engine import messages
from paceline.v1 import common_pb2, kv_pb2, kv_pb2_grpc
from paceline.worker.handoffs import Handoff, key_of, reader_of
from paceline.worker.pins import miss, pin_or_let_go
from paceline.worker.session import Session
from paceline.worker.ticket_check import check_ticket

_log = structlog.get_logger("paceline.worker")

Context = grpc.aio.ServicerContext[Any, Any]


class KvTransferServicer(kv_pb2_grpc.KvTransferServiceServicer):
    """`current` gives the session, or raises Unavailable while the rank is away."""

    def __init__(self, current: Callable[[], Session]) -> None:
        self._current = current

    async def Describe(
        self, request: kv_pb2.DescribeRequest, context: Context
    ) -> kv_pb2.DescribeResponse:
        session = self._current()
        if request.source_incarnation not in ("", session.info.incarnation):
            reason = "another incarnation answers at the source's address"
            raise KvUnavailable(reason, field="source_incarnation")
        if request.content_digest != session.info.content_digest:
            raise other_content(session, request)
        return describe(session)

    async def Progress(
        self, request: kv_pb2.ProgressRequest, context: Context
    ) -> AsyncIterator[kv_pb2.ProgressEvent]:
        session = self._current()
        handoff = await self._handoff(session, request.ticket)
        expect_reader(session, handoff, list(request.first_blocks))
        async for event in handoff.follow():
            yield event

    async def Pin(self, request: kv_pb2.PinRequest, context: Context) -> kv_pb2.PinResponse:
        session = self._current()
        runs = checked_runs(request.runs, len(session.rank.ready.groups))
        is_good = self._is_good(session, request.ticket)
        handoff = session.handoffs.get(key_of(request.ticket)) if is_good else None
        if request.with_tail and handoff is None:
            raise KvUnavailable("the hand-off is not held here")
        if not is_good:
            return await miss(session, runs)
        tail_slot = handoff.slot_number if handoff and request.with_tail else None
        pinned = await pin_or_let_go(session, request.ticket, runs, tail_slot)
        if handoff is not None and handoff.lacking is not None:
            expect_reader(session, handoff, after_pin(handoff.lacking, request.runs, pinned.runs))
        return pinned

    async def Unpin(self, request: kv_pb2.UnpinRequest, context: Context) -> kv_pb2.UnpinResponse:
        session = self._current()
        if not self._is_good(session, request.ticket):
            return kv_pb2.UnpinResponse()
        session.unpin(session.leases.release(request.lease_id, reader_of(request.ticket)))
        handoff = session.handoffs.get(key_of(request.ticket)) if request.complete else None
        if handoff is not None and handoff.record is not None:
            session.send(messages.Release(handoff.slot_number))
        return kv_pb2.UnpinResponse()

    async def Report(
        self, request: kv_pb2.ReportRequest, context: Context
    ) -> kv_pb2.ReportResponse:
        session = self._current()
        session.metrics.mismatch_reported()
        call = messages.Recheck(request.page, request.generation)
        reply = await session.rank.link.call(call)
        assert isinstance(reply, messages.Rechecked)
        return kv_pb2.ReportResponse(dropped=reply.dropped, known=reply.known)

    async def KeepLeases(
        self, request_iterator: AsyncIterator[kv_pb2.LeaseBeat], context: Context
    ) -> AsyncIterator[kv_pb2.LeaseBeatReply]:
        session = self._current()
        session.serve_in(asyncio.current_task())
        async for beat in request_iterator:
            reader = (beat.reader_worker, beat.reader_incarnation)
            dropped, unknown = session.leases.beat(reader, beat.lease_ids)
            session.unpin(dropped)
            yield kv_pb2.LeaseBeatReply(unknown_lease_ids=unknown)

    async def _handoff(self, session: Session, ticket: common_pb2.Ticket) -> Handoff:
        """Adopt and Prefill are sent at the same time: a reader may come first."""
        self._check(session, ticket)
        left_s = ticket.expires_unix_ms / 1000 - time.time()
        timeout_s = min(left_s, session.config.timers.silence_s)
        return await session.handoffs.wait_for(key_of(ticket), timeout_s)

    def _is_good(self, session: Session, ticket: common_pb2.Ticket) -> bool:
        """Whether anything here is for the ticket's reader. If not, that stays between us and our
        log: the reader is answered as if nothing were here."""
        try:
            self._check(session, ticket)
        except KvUnavailable as error:
            session.metrics.pins_refused.inc()
            _log.warning("a pin is refused", reader=ticket.reader_worker[:64], reason=error.message)
            return False
        return True

    def _check(self, session: Session, ticket: common_pb2.Ticket) -> None:
        check_ticket(session.info, session.secret, ticket, source_is_here=True)


def other_content(session: Session, request: kv_pb2.DescribeRequest) -> IncompatiblePeer:
    """Names all parts of the content digest that differ; the field is the first of them."""
    own = session.rank.ready.content_parts
    given = {name: request.content_parts.get(name, value)[:64] for name, value in own.items()}
    differing = {name: value for name, value in given.items() if value != own[name]}
    if not differing:  # from a reader that does not say what its digest is made of
        differing, own = {"content_digest": request.content_digest[:16]}, {}
    reasons = [
        f"{name}={value!r}: the KV here is of {own.get(name, session.info.content_digest[:16])!r}"
        for name, value in differing.items()
    ]
    return IncompatiblePeer("; ".join(reasons), field=next(iter(differing)))


def expect_reader(session: Session, handoff: Handoff, lacking: list[int]) -> None:
    """Has the rank pin, when the prompt is done, what the reader lacks by then."""
    if len(lacking) == len(session.rank.ready.groups) and not handoff.is_over:
        handoff.lacking = lacking
        session.send_to_slot(messages.Follow(handoff.slot_number, lacking))


def after_pin(
    lacking: list[int], asked: Iterable[kv_pb2.KeyRun], found: Iterable[kv_pb2.PageRun]
) -> list[int]:
    """What a reader lacks once it has pulled what it has pinned: it goes on where it was."""
    after = list(lacking)
    for run, pages in zip(asked, found, strict=True):
        if run.group < len(after):
            after[run.group] += len(pages.pages)
    return after


def checked_runs(runs: Sequence[kv_pb2.KeyRun], num_groups: int) -> list[messages.KeyRun]:
    if len(runs) > num_groups:
        raise InvalidRequest("runs", len(runs), f"must be one of each of {num_groups} page groups")
    return [messages.KeyRun(run.group, split_keys(run.keys)) for run in runs]


def split_keys(packed: bytes) -> list[bytes]:
    if len(packed) % KEY_BYTES:
        raise InvalidRequest("keys", f"{len(packed)} bytes", "must be 32 bytes each")
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def describe(session: Session) -> kv_pb2.DescribeResponse:
    info, ready = session.info, session.rank.ready
    canary = ready.canary
    groups = [
        kv_pb2.PageGroup(
            name=group.name,
            num_layers=group.num_layers,
            num_planes=group.num_planes,
            num_heads=group.num_heads,
            head_dim=group.head_dim,
            dtype=group.dtype,
            page_tokens=group.page_tokens,
            window=group.window,
        )
        for group in ready.groups
    ]
    transports = [
        kv_pb2.TransportAddress(name=name, address=address)
        for name, address in session.connectors.addresses()
    ]
    return kv_pb2.DescribeResponse(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        content_digest=info.content_digest,
        layout_digest=info.layout_digest,
        groups=groups,
        num_pages=info.num_pages,
        transports=transports,
        canary=[
            kv_pb2.PageRef(page=page, checksums=sums)
            for page, sums in zip(canary.own, canary.checksums, strict=True)
        ],
        layers=[kv_pb2.LayerPlace(group=group, index=index) for group, index in ready.layers],
        ranks=[
            kv_pb2.RankPages(
                first_head=heads.first,
                num_heads=heads.count,
                first_page=rank * ready.num_all_pages,
            )
            for rank, heads in enumerate(ready.ranks)
        ],
        content_parts=ready.content_parts,
    )
