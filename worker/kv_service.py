"""Source side of KvTransferService: this worker's KV, by name, for readers under a lease."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

import grpc

from paceline.core.errors import (
    IncompatiblePeer,
    InvalidRequest,
    KvUnavailable,
    PacelineError,
    PeerGone,
)
from paceline.core.keys import KEY_BYTES
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine import messages
from paceline.rpc.status import abort
from paceline.v1 import common_pb2, kv_pb2, kv_pb2_grpc
from paceline.worker.actions import check_ticket
from paceline.worker.handoffs import Handoff, key_of
from paceline.worker.pins import pin
from paceline.worker.session import Session

Context = grpc.aio.ServicerContext[Any, Any]
Q = TypeVar("Q")
R = TypeVar("R")
Method = Callable[["KvTransferServicer", Q, Context], Awaitable[R]]


def _refusing(method: Method[Q, R]) -> Method[Q, R]:
    """Turns an error of ours into its gRPC status."""

    @wraps(method)
    async def wrapped(self: "KvTransferServicer", request: Q, context: Context) -> R:
        try:
            return await method(self, request, context)
        except PacelineError as error:
            await abort(context, error)

    return wrapped


class KvTransferServicer(kv_pb2_grpc.KvTransferServiceServicer):
    """`current` gives the session, or raises Unavailable while the rank is away."""

    def __init__(self, current: Callable[[], Session]) -> None:
        self._current = current

    @_refusing
    async def Describe(
        self, request: kv_pb2.DescribeRequest, context: Context
    ) -> kv_pb2.DescribeResponse:
        session = self._current()
        if request.content_digest != session.info.content_digest:
            given, own = request.content_digest[:12], session.info.content_digest[:12]
            reason = f"content_digest={given!r}: the KV here is of {own!r}"
            raise IncompatiblePeer(reason, field="content_digest")
        return describe(session)

    async def Progress(
        self, request: kv_pb2.ProgressRequest, context: Context
    ) -> AsyncIterator[kv_pb2.ProgressEvent]:
        try:
            handoff = await self._handoff(self._current(), request.ticket)
        except PacelineError as error:
            await abort(context, error)
        async for event in handoff.follow():
            yield event

    @_refusing
    async def Pin(self, request: kv_pb2.PinRequest, context: Context) -> kv_pb2.PinResponse:
        session = self._current()
        if request.source_incarnation != session.info.incarnation:
            raise PeerGone("the pool of that incarnation is gone")
        if len(request.keys) % KEY_BYTES:
            raise InvalidRequest("keys", f"{len(request.keys)} bytes", "must be 32 bytes each")
        handoff = None
        if request.HasField("tail"):
            check_ticket(session, request.tail, source_is_here=True)
            handoff = session.handoffs.get(key_of(request.tail))
            if handoff is None:
                raise KvUnavailable("the hand-off is not held here")
        # Not cut off by a reader that leaves: what is pinned must reach its lease.
        return await asyncio.shield(pin(session, request, handoff))

    @_refusing
    async def Unpin(self, request: kv_pb2.UnpinRequest, context: Context) -> kv_pb2.UnpinResponse:
        session = self._current()
        session.unpin(session.leases.release(request.lease_id))
        if request.HasField("ticket"):
            check_ticket(session, request.ticket, source_is_here=True)
            handoff = session.handoffs.get(key_of(request.ticket))
            if handoff is not None and handoff.record is not None:
                session.send(messages.Release(handoff.slot_number))
        return kv_pb2.UnpinResponse()

    @_refusing
    async def Report(
        self, request: kv_pb2.ReportRequest, context: Context
    ) -> kv_pb2.ReportResponse:
        session = self._current()
        session.metrics.mismatch_reported()
        call = messages.Recheck(request.page, request.generation)
        reply = await session.rank.link.call(call)
        assert isinstance(reply, messages.Rechecked)
        return kv_pb2.ReportResponse(dropped=reply.dropped)

    async def KeepLeases(
        self, request_iterator: AsyncIterator[kv_pb2.LeaseBeat], context: Context
    ) -> AsyncIterator[kv_pb2.LeaseBeatReply]:
        try:
            session = self._current()
        except PacelineError as error:
            await abort(context, error)
        session.serve_in(asyncio.current_task())
        async for beat in request_iterator:
            reader = (beat.reader_worker, beat.reader_incarnation)
            dropped, unknown = session.leases.beat(reader, beat.lease_ids)
            session.unpin(dropped)
            yield kv_pb2.LeaseBeatReply(unknown_lease_ids=unknown, step=session.step)

    async def _handoff(self, session: Session, ticket: common_pb2.Ticket) -> Handoff:
        """Adopt and Prefill are sent at the same time: a reader may come first."""
        check_ticket(session, ticket, source_is_here=True)
        left_s = ticket.expires_unix_ms / 1000 - time.time()
        timeout_s = min(left_s, session.config.silence_s)
        return await session.handoffs.wait_for(key_of(ticket), timeout_s)


def describe(session: Session) -> kv_pb2.DescribeResponse:
    info = session.info
    groups = [
        kv_pb2.PageGroup(
            name=group.name,
            num_layers=group.num_layers,
            num_planes=group.num_planes,
            num_heads=group.num_heads,
            head_dim=group.head_dim,
            dtype=group.dtype,
            page_tokens=PAGE_TOKENS,
        )
        for group in session.rank.ready.groups
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
    )
