"""What a router's commands do. Each role's servicer picks those that it accepts."""

import asyncio
from collections.abc import Callable

from paceline.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvUnavailable,
    PacelineError,
    Unavailable,
)
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine import messages
from paceline.rpc import tickets
from paceline.v1 import common_pb2, worker_pb2
from paceline.worker.adoption import Adoption
from paceline.worker.requests import to_spec
from paceline.worker.router_stream import RouterStream
from paceline.worker.session import Session
from paceline.worker.slots import SlotState

Action = Callable[[Session, RouterStream, worker_pb2.WorkerCommand], None]

MAX_HOLD_MS = 60_000


def run(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Prefill and decode here."""
    slot = open_slot(session, stream, command.run.slot, command.run.request)
    session.send(messages.Submit(slot.number, slot.request))


def reserve(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Credit for a request whose KV will be pulled; Reserved or Busy follows."""
    message = command.reserve
    if session.draining:
        load = session.load
        needed = -(-len(message.request.token_ids) // PAGE_TOKENS)
        stream.add_busy(message.slot, needed, max(load.num_free_pages, 0))
        stream.add_ended(message.slot)
        return
    slot = open_slot(session, stream, message.slot, message.request)
    hold_ms = min(message.hold_ms or MAX_HOLD_MS, MAX_HOLD_MS)
    error = KvUnavailable("the reservation was not adopted in time")
    slot.hold = asyncio.get_running_loop().call_later(hold_ms / 1000, session.end, slot, error)
    session.send(messages.Reserve(slot.number, slot.request))


def prefill(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Compute the prompt's KV and hold it for the ticket's reader."""
    message = command.prefill
    check_ticket(session, message.ticket, source_is_here=True)
    if message.ticket.request_id != message.request.request_id:
        raise KvUnavailable("the ticket names another request")
    slot = open_slot(session, stream, message.slot, message.request)
    try:
        slot.handoff = session.handoffs.open(slot.number, message.ticket)
    except PacelineError:
        session.slots.close(slot)
        raise
    session.send(messages.Submit(slot.number, slot.request, prefill_only=True))


def adopt(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Pull the KV of a reserved slot from its source, then go on from there."""
    message = command.adopt
    slot = stream.slots.get(message.slot)
    if slot is None or slot.ending:
        return  # its end is on the way to the router
    if slot.reserved is None or slot.adoption is not None:
        raise KvUnavailable("the slot holds no reservation to adopt")
    check_ticket(session, message.ticket, source_is_here=False)
    if slot.hold is not None:
        slot.hold.cancel()
    slot.adoption = Adoption(session, slot, message.ticket, message.source_endpoint)


def cancel(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Ends a slot, or some of its choices. Unknown slots have ended already."""
    slot = stream.slots.get(command.cancel.slot)
    if slot is None or slot.ending:
        return
    choices = tuple(c for c in command.cancel.choices if c in slot.request.choices)
    if not command.cancel.choices or set(choices) == set(slot.request.choices):
        session.end(slot)
    elif choices:
        session.send(messages.Cancel(slot.number, choices))


def revoke(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Releases all that a ticket holds here, at once."""
    handoff = session.handoffs.get((command.revoke.request_id, command.revoke.attempt))
    if handoff is None:
        return
    for lease_id in handoff.lease_ids:
        session.unpin(session.leases.release(lease_id))
    slot = session.slots.get(handoff.slot_number)
    if slot is not None:
        session.end(slot)


def open_slot(
    session: Session, stream: RouterStream, router_slot: int, request: common_pb2.TokenRequest
) -> SlotState:
    """Raises what is wrong with the request, Overloaded, or Unavailable while draining."""
    if session.draining:
        raise Unavailable("the worker is draining", retry_after_s=1.0)
    spec = to_spec(
        request,
        model=session.info.model,
        vocab_size=session.info.vocab_size,
        context_length=session.info.context_length,
    )
    slot = session.slots.open(stream, router_slot, spec)
    if request.budget_ms:
        error = DeadlineExceeded("the request's time is over")
        loop = asyncio.get_running_loop()
        slot.deadline = loop.call_later(request.budget_ms / 1000, session.end, slot, error)
    return slot


def check_ticket(session: Session, ticket: common_pb2.Ticket, *, source_is_here: bool) -> None:
    """Raises KvUnavailable unless it is genuine and names this worker on the right side.

    Never InvalidRequest: routers mint tickets, so a wrong one is not the caller's fault.
    """
    info = session.info
    mine = (info.worker_id, info.incarnation)
    secret = session.config.secret.encode()
    try:
        tickets.check(ticket, secret, incarnation=ticket.source_incarnation)
    except InvalidRequest as error:
        raise KvUnavailable(error.message, field=error.field) from None
    side = "source" if source_is_here else "reader"
    named = (getattr(ticket, f"{side}_worker"), getattr(ticket, f"{side}_incarnation"))
    if named != mine:
        raise KvUnavailable(f"the ticket's {side} is another worker or incarnation")
    if ticket.content_digest != info.content_digest:
        raise KvUnavailable("the ticket is for KV of another model")
