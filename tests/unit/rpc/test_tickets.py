import time
from collections.abc import Callable

import pytest

from paceline.core.errors import InvalidRequest
from paceline.rpc import tickets
from paceline.v1 import common_pb2

SECRET = b"deployment"


def ticket(**overrides: object) -> common_pb2.Ticket:
    fields: dict[str, object] = {
        "request_id": "r-1",
        "attempt": 1,
        "tenant": "t",
        "source_worker": "prefill-0",
        "source_incarnation": "a",
        "reader_worker": "decode-0",
        "reader_incarnation": "b",
        "content_digest": "00ff",
        "expires_unix_ms": int(time.time() * 1000) + 10_000,
    }
    return common_pb2.Ticket(**{**fields, **overrides})  # type: ignore[arg-type]


def test_a_signed_ticket_passes() -> None:
    tickets.check(tickets.sign(ticket(), SECRET), SECRET)


@pytest.mark.parametrize(
    "forge",
    [
        lambda t: setattr(t, "tenant", "other"),
        lambda t: setattr(t, "reader_worker", "decode-1"),
        lambda t: setattr(t, "expires_unix_ms", t.expires_unix_ms + 1),
        lambda t: setattr(t, "attempt", 2),
        lambda t: setattr(t, "signature", b""),
    ],
)
def test_any_changed_field_voids_it(forge: Callable[[common_pb2.Ticket], None]) -> None:
    signed = tickets.sign(ticket(), SECRET)
    forge(signed)
    with pytest.raises(InvalidRequest, match=r"ticket\.signature"):
        tickets.check(signed, SECRET)


def test_moving_bytes_between_fields_voids_it() -> None:
    signed = tickets.sign(ticket(source_worker="ab", source_incarnation="c"), SECRET)
    signed.source_worker, signed.source_incarnation = "a", "bc"
    with pytest.raises(InvalidRequest, match="signature"):
        tickets.check(signed, SECRET)


def test_an_expired_ticket_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="expires_unix_ms"):
        old = ticket(expires_unix_ms=int(time.time() * 1000) - 1)
        tickets.check(tickets.sign(old, SECRET), SECRET)
