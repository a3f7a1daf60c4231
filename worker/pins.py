"""Pins pages for a reader: the rank's pool looks them up, the lease table says for how long."""

from paceline.core.errors import KvUnavailable, PacelineError
from paceline.core.keys import KEY_BYTES
from paceline.engine.messages import Pin, Pinned, PinnedPage
from paceline.v1 import kv_pb2
from paceline.worker.handoffs import Handoff
from paceline.worker.session import Session


async def pin(
    session: Session, request: kv_pb2.PinRequest, handoff: Handoff | None
) -> kv_pb2.PinResponse:
    """Pins the leading run of the request's keys, and the tail of `handoff` when given.

    Raises Overloaded at the cap on pins, PeerGone when the lease has ended. What was pinned for a
    lease that ended meanwhile is unpinned again.
    """
    keys = [request.keys[i : i + KEY_BYTES] for i in range(0, len(request.keys), KEY_BYTES)]
    reader = (request.reader_worker, request.reader_incarnation)
    num_pages = len(keys) + (handoff is not None)
    session.leases.promise(num_pages)
    try:
        lease_id = session.leases.open(reader, request.lease_id)
        try:
            pinned = await _call(session, Pin(keys, handoff.slot_number if handoff else None))
        except PacelineError:
            if not request.lease_id:
                session.leases.release(lease_id)
            raise
    finally:
        session.leases.keep(num_pages)
    held = [*pinned.pages, *([pinned.tail] if pinned.tail else [])]
    pages = [(page.page, page.generation) for page in held]
    if not session.leases.add(lease_id, pages):
        session.unpin(pages)
        raise KvUnavailable("the lease ended while its pages were being pinned")
    if handoff is not None:
        handoff.lease_ids.add(lease_id)
    return kv_pb2.PinResponse(
        lease_id=lease_id,
        pages=[_page_ref(page) for page in pinned.pages],
        tail=_page_ref(pinned.tail) if pinned.tail else None,
        num_tail_tokens=pinned.num_tail_tokens,
    )


async def _call(session: Session, call: Pin) -> Pinned:
    reply = await session.rank.link.call(call)
    assert isinstance(reply, Pinned)
    return reply


def _page_ref(page: PinnedPage) -> kv_pb2.PageRef:
    return kv_pb2.PageRef(page=page.page, generation=page.generation, checksums=page.checksums)
