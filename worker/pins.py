"""Pins pages for a reader: the rank's pool looks them up, the lease table says for how long."""

import asyncio
from typing import TYPE_CHECKING

from paceline.core.errors import KvUnavailable, Overloaded, PacelineError
from paceline.core.ids import LeaseId
from paceline.engine.messages import KeyRun, Pin, Pinned, PinnedPage
from paceline.v1 import common_pb2, kv_pb2
from paceline.worker.handoffs import Handoff, key_of, reader_of
from paceline.worker.leases import PageLives, new_lease_id

if TYPE_CHECKING:
    from paceline.worker.session import Session


async def pin(
    session: "Session", ticket: common_pb2.Ticket, runs: list[KeyRun], tail_slot: int | None
) -> kv_pb2.PinResponse:
    """Pins what leads of `runs`, and the tails of `tail_slot` when given, under a new lease.

    Raises Overloaded at the cap on pins. What was pinned for a lease that ended meanwhile is
    unpinned again.
    """
    reader = reader_of(ticket)
    num_tails = 0 if tail_slot is None else len(session.rank.ready.groups)
    num_pages = sum(len(run.keys) for run in runs) + num_tails
    session.leases.promise(num_pages)
    try:
        lease_id = session.leases.open(reader, key_of(ticket))
        try:
            pinned = await _call(session, Pin(runs, tail_slot))
        except PacelineError:
            session.leases.release(lease_id, reader)
            raise
    finally:
        session.leases.keep(num_pages)
    pages = _lives(pinned)
    if not session.leases.add(lease_id, pages):
        session.unpin(pages)
        raise KvUnavailable("the lease ended while its pages were being pinned")
    return _response(lease_id, pinned)


async def miss(session: "Session", runs: list[KeyRun]) -> kv_pb2.PinResponse:
    """What a pin of absent blocks gets, after as long, and nothing is held."""
    pinned = await _call(session, Pin([KeyRun(run.group, []) for run in runs], None))
    return _response(new_lease_id(), pinned)


async def pin_or_let_go(
    session: "Session", ticket: common_pb2.Ticket, runs: list[KeyRun], tail_slot: int | None
) -> kv_pb2.PinResponse:
    """`pin`, done whole though its caller be cut off: then nobody knows the lease, and it ends."""
    pinning = asyncio.ensure_future(pin(session, ticket, runs, tail_slot))

    def let_go(done: "asyncio.Future[kv_pb2.PinResponse]") -> None:
        if not done.cancelled() and done.exception() is None:
            session.unpin(session.leases.release(done.result().lease_id, reader_of(ticket)))

    try:
        return await asyncio.shield(pinning)
    except asyncio.CancelledError:
        pinning.add_done_callback(let_go)
        raise


def lease_pinned(
    session: "Session", ticket: common_pb2.Ticket, pinned: Pinned
) -> kv_pb2.PinResponse | None:
    """Puts what is pinned already under a new lease; at a cap it is unpinned again: None."""
    pages = _lives(pinned)
    try:
        session.leases.promise(len(pages))
        session.leases.keep(len(pages))
        lease_id = session.leases.open(reader_of(ticket), key_of(ticket), is_awaited=True)
    except Overloaded:
        session.unpin(pages)
        return None
    session.leases.add(lease_id, pages)
    return _response(lease_id, pinned)


def drop(session: "Session", pinned: Pinned) -> None:
    """Unpins what was pinned for a hand-off that has ended."""
    session.unpin(_lives(pinned))


def end_handoff(session: "Session", handoff: Handoff) -> None:
    """Unpins what its reader has not been told of; of the rest it must know by now."""
    if handoff.rest is None:
        return
    lease_id = handoff.rest.lease_id
    if handoff.is_told:
        session.leases.expect(lease_id)
    else:
        session.unpin(session.leases.release(lease_id, reader_of(handoff.ticket)))


def _lives(pinned: Pinned) -> PageLives:
    return [(page.page, page.generation) for page in pinned.pages]


def _response(lease_id: LeaseId, pinned: Pinned) -> kv_pb2.PinResponse:
    return kv_pb2.PinResponse(
        lease_id=lease_id,
        runs=[kv_pb2.PageRun(pages=map(_page_ref, run)) for run in pinned.runs],
        tails=map(_page_ref, pinned.tails),
        num_tail_tokens=pinned.num_tail_tokens,
    )


async def _call(session: "Session", call: Pin) -> Pinned:
    reply = await session.rank.link.call(call)
    assert isinstance(reply, Pinned)
    return reply


def _page_ref(page: PinnedPage) -> kv_pb2.PageRef:
    return kv_pb2.PageRef(page=page.page, generation=page.generation, checksums=page.checksums)
