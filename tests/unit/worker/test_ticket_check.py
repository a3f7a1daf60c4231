import time

import pytest

from paceline.core.errors import KvUnavailable
from paceline.rpc import tickets
from paceline.v1 import common_pb2, worker_pb2
from paceline.worker.ticket_check import check_ticket

SECRET = b"deployment"
INFO = worker_pb2.WorkerInfo(worker_id="prefill-0", incarnation="a", content_digest="00ff")


def ticket(**overrides: object) -> common_pb2.Ticket:
    fields: dict[str, object] = {
        "request_id": "r-1",
        "source_worker": "prefill-0",
        "source_incarnation": "a",
        "reader_worker": "decode-0",
        "reader_incarnation": "b",
        "content_digest": "00ff",
        "expires_unix_ms": int(time.time() * 1000) + 10_000,
    }
    return tickets.sign(common_pb2.Ticket(**{**fields, **overrides}), SECRET)  # type: ignore[arg-type]


def test_a_ticket_is_good_at_the_side_that_it_names() -> None:
    check_ticket(INFO, SECRET, ticket(), source_is_here=True)
    with pytest.raises(KvUnavailable, match="reader is another worker"):
        check_ticket(INFO, SECRET, ticket(), source_is_here=False)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("source_worker", "prefill-1", "source is another worker or incarnation"),
        ("source_incarnation", "old", "source is another worker or incarnation"),
        ("content_digest", "00fe", "another model"),
        ("expires_unix_ms", 1, "has passed"),
    ],
)
def test_a_wrong_ticket_is_refused(field: str, value: object, reason: str) -> None:
    with pytest.raises(KvUnavailable, match=reason):
        check_ticket(INFO, SECRET, ticket(**{field: value}), source_is_here=True)
    with pytest.raises(KvUnavailable, match="is not ours"):
        check_ticket(INFO, b"other", ticket(), source_is_here=True)
