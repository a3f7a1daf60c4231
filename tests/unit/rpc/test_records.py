import pytest

from paceline.core.errors import InvalidRequest
from paceline.rpc import records
from paceline.v1 import worker_pb2

_SECRET = b"the deployment's secret"


def _record() -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        worker_id="d0", incarnation="i1", endpoint="127.0.0.1:9300", transports=["shm", "tcp"]
    )


def test_a_signed_record_comes_back() -> None:
    signed = records.sign(_record(), _SECRET)
    assert records.parse(signed.SerializeToString(), _SECRET) == signed
    assert records.sign(signed, _SECRET) == signed


@pytest.mark.parametrize("field", ["worker_id", "incarnation", "endpoint", "content_digest"])
def test_any_changed_field_is_refused(field: str) -> None:
    signed = records.sign(_record(), _SECRET)
    setattr(signed, field, "elsewhere")
    with pytest.raises(InvalidRequest, match="signature"):
        records.check(signed, _SECRET)


@pytest.mark.parametrize(
    "raw", [b"", b"\xff\xff\xff", b"{}", b"a" * (records.MAX_RECORD_BYTES + 1)]
)
def test_junk_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        records.parse(raw, _SECRET)


def test_unsigned_and_foreign_records_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        records.check(_record(), _SECRET)
    with pytest.raises(InvalidRequest):
        records.check(records.sign(_record(), b"another"), _SECRET)
