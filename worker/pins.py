"""Pins pages for a reader: the rank's pool looks them up, the lease table says for how long."""

from paceline.core.errors import KvUnavailable, PacelineError
from paceline.engine.messages import KeyRun, Pin, Pinned, PinnedPage
from paceline.v1 import common_pb2, kv_pb2
from paceline.worker.handoffs import key_of, reader_of
from paceline.worker.session import Session


async def pin(
    session: Session, ticket: common_pb2.Ticket, runs: list[KeyRun], tail_slot: int | None
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
    pages = [(page.page, page.generation) for page in pinned.pages]
    if not session.leases.add(lease_id, pages):
        session.unpin(pages)
        raise KvUnavailable("the lease ended while its pages were being pinned")
    return kv_pb2.PinResponse(
        lease_id=lease_id,
        runs=[kv_pb2.PageRun(pages=map(_page_ref, run)) for run in pinned.runs],
        tails=map(_page_ref, pinned.tails),
        num_tail_tokens=pinned.num_tail_tokens,
    )


async def _call(session: Session, call: Pin) -> Pinned:
    reply = await session.rank.link.call(call)
    assert isinstance(reply, Pinned)
    return reply


def _page_ref(page: PinnedPage) -> kv_pb2.PageRef:
    return kv_pb2.PageRef(page=page.page, generation=page.generation, checksums=page.checksums)
