"""Tickets: who may take which KV from whom. Minted by the router, checked by the source."""

import hmac
import time

from paceline.core.errors import InvalidRequest
from paceline.v1 import common_pb2


def sign(ticket: common_pb2.Ticket, secret: bytes) -> common_pb2.Ticket:
    """The ticket with its signature set."""
    ticket.signature = _digest(ticket, secret)
    return ticket


def check(ticket: common_pb2.Ticket, secret: bytes) -> None:
    """Raises InvalidRequest unless the ticket is genuine and in time. Its sides are not checked."""
    if not hmac.compare_digest(ticket.signature, _digest(ticket, secret)):
        raise InvalidRequest("ticket.signature", ticket.signature.hex()[:16], "is not ours")
    if ticket.expires_unix_ms < time.time() * 1000:
        raise InvalidRequest("ticket.expires_unix_ms", ticket.expires_unix_ms, "has passed")


def _digest(ticket: common_pb2.Ticket, secret: bytes) -> bytes:
    parts = (
        ticket.request_id,
        str(ticket.attempt),
        ticket.tenant,
        ticket.source_worker,
        ticket.source_incarnation,
        ticket.reader_worker,
        ticket.reader_incarnation,
        ticket.content_digest,
        str(ticket.expires_unix_ms),
    )
    message = b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in parts)
    return hmac.digest(secret, b"pl-tick1" + message, "sha256")
