"""Whether a ticket is good for what is asked under it."""

from paceline.core.errors import InvalidRequest, KvUnavailable
from paceline.rpc import tickets
from paceline.v1 import common_pb2, worker_pb2


def check_ticket(
    info: worker_pb2.WorkerInfo, secret: bytes, ticket: common_pb2.Ticket, *, source_is_here: bool
) -> None:
    """Raises KvUnavailable unless it is genuine, in time, and names this worker on its side.

    Never InvalidRequest: routers mint tickets, so a wrong one is not the caller's fault.
    """
    try:
        tickets.check(ticket, secret)
    except InvalidRequest as error:
        raise KvUnavailable(error.message, field=error.field) from None
    side = "source" if source_is_here else "reader"
    named = (getattr(ticket, f"{side}_worker"), getattr(ticket, f"{side}_incarnation"))
    if named != (info.worker_id, info.incarnation):
        raise KvUnavailable(f"the ticket's {side} is another worker or incarnation")
    if ticket.content_digest != info.content_digest:
        raise KvUnavailable("the ticket is for KV of another model")
