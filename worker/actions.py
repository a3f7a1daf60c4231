"""What a router's commands do. Each role's servicer picks those that it accepts."""

import asyncio
from collections.abc import Callable

from paceline.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvUnavailable,
    PacelineError,
)
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine import messages
from paceline.v1 import common_pb2, worker_pb2
from paceline.worker.adoption import Adoption
from paceline.worker.requests import to_spec
from paceline.worker.router_stream import GivenUp, RouterStream
from paceline.worker.session import Session
from paceline.worker.slot_trace import SlotTrace
from paceline.worker.slots import SlotState
from paceline.worker.ticket_check import check_ticket

Action = Callable[[Session, RouterStream, worker_pb2.WorkerCommand], None]

MAX_HOLD_MS = 60_000
MAX_KEEP_MS = 3_600_000


def run(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Prefill and decode here, or an embedding."""
    slot = open_slot(session, stream, command.run.slot, command.run.request)
    session.submit(slot, command.run.hints)


def reserve(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Credit for a request whose KV will be pulled; Reserved or Busy follows."""
    message = command.reserve
    if session.draining:
        load = session.load
        needed = -(-len(message.request.token_ids) // PAGE_TOKENS)
        stream.add_busy(message.slot, needed, max(load.num_free_pages, 0))
        stream.add_ended(message.slot)
        return
    _check_generates(message.request)
    slot = open_slot(session, stream, message.slot, message.request)
    slot.is_reservation = True
    hold_ms = min(message.hold_ms or MAX_HOLD_MS, MAX_HOLD_MS)
    error = KvUnavailable("the reservation was not adopted in time")
    slot.hold = asyncio.get_running_loop().call_later(hold_ms / 1000, session.end, slot, error)
    session.send(messages.Reserve(slot.number, slot.request))


def prefill(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Compute the prompt's KV and hold it for the ticket's reader."""
    message = command.prefill
    check_ticket(session.info, session.secret, message.ticket, source_is_here=True)
    if message.ticket.request_id != message.request.request_id:
        raise KvUnavailable("the ticket names another request")
    try:
        _check_generates(message.request)
        slot = open_slot(session, stream, message.slot, message.request)
    except PacelineError as error:
        session.handoffs.refuse(message.ticket, error)
        raise
    try:
        slot.handoff = session.handoffs.open(slot.number, message.ticket)
    except PacelineError:
        session.slots.close(slot)
        raise
    session.submit(slot, message.hints, prefill_only=True)
    if message.keep_ms:
        session.keep(slot, min(message.keep_ms, MAX_KEEP_MS) / 1000)


def adopt(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Pull the KV of a reserved slot from its source, then go on from there."""
    message = command.adopt
    slot = stream.slots.get(message.slot)
    if slot is None or slot.ending:
        return  # its end is on the way to the router
    if slot.reserved is None or slot.adoption is not None:
        raise KvUnavailable("the slot holds no reservation to adopt")
    check_ticket(session.info, session.secret, message.ticket, source_is_here=False)
    if slot.hold is not None:
        slot.hold.cancel()
    if slot.trace is not None:
        slot.trace.adopts(message.ticket.source_worker)
    slot.adoption = Adoption(session, slot, message.ticket, message.source_endpoint)


def cancel(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Ends a slot, or some of its choices. Unknown slots have ended already."""
    slot = stream.slots.get(command.cancel.slot)
    if slot is None or slot.ending:
        return
    named = set(command.cancel.choices) or slot.wanted
    dropped = slot.wanted & named
    slot.wanted -= dropped
    if not slot.wanted:
        session.end(slot)
    elif dropped:
        session.send_to_slot(messages.Cancel(slot.number, tuple(dropped)))


def let_go(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Nobody will pull this prompt again."""
    session.let_go(stream, command.let_go.slot)


def revoke(session: Session, stream: RouterStream, command: worker_pb2.WorkerCommand) -> None:
    """Releases all that a ticket holds here, at once."""
    key = (command.revoke.request_id, command.revoke.attempt)
    session.unpin(session.leases.revoke(key))
    handoff = session.handoffs.get(key)
    slot = session.slots.get(handoff.slot_number) if handoff is not None else None
    if slot is not None:
        session.end(slot)


def open_slot(
    session: Session, stream: RouterStream, router_slot: int, request: common_pb2.TokenRequest
) -> SlotState:
    """Raises what is wrong with the request, Overloaded, or Unavailable while draining."""
    if session.draining:
        raise GivenUp("the worker is draining", retry_after_s=1.0)
    spec = to_spec(
        request,
        model=session.info.model,
        vocab_size=session.info.vocab_size,
        context_length=session.info.context_length,
    )
    slot = session.slots.open(stream, router_slot, spec)
    if request.traceparent and session.tracing.is_on:
        slot.trace = SlotTrace(session.tracing, request.traceparent)
    if request.budget_ms:
        error = DeadlineExceeded("the request's time is over")
        loop = asyncio.get_running_loop()
        slot.deadline = loop.call_later(request.budget_ms / 1000, session.end, slot, error)
    return slot


def _check_generates(request: common_pb2.TokenRequest) -> None:
    """Raises InvalidRequest for an embedding, whose KV nobody takes over."""
    is_embedding = request.WhichOneof("wanted") == "pooling"
    reason = "an embedding is made by one worker"
    InvalidRequest.check("pooling", request.pooling, not is_embedding, reason)
