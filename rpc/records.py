"""Worker records: signed, because whoever can write to Redis could otherwise redirect traffic.

The record names the endpoint, so a genuine one that is replayed leads to the genuine worker only.
"""

import hmac

from google.protobuf.message import DecodeError

from paceline.core.errors import InvalidRequest
from paceline.v1 import worker_pb2

MAX_RECORD_BYTES = 16 << 10


def sign(info: worker_pb2.WorkerInfo, secret: bytes) -> worker_pb2.WorkerInfo:
    """The record with its signature set: for Redis and for the first frame of a stream."""
    info.signature = _digest(info, secret)
    return info


def check(info: worker_pb2.WorkerInfo, secret: bytes) -> None:
    """Raises InvalidRequest unless a holder of the secret wrote this record."""
    if not hmac.compare_digest(info.signature, _digest(info, secret)):
        raise InvalidRequest("signature", info.signature.hex()[:16], "is not ours")


def parse(raw: bytes, secret: bytes) -> worker_pb2.WorkerInfo:
    """The record in `raw`, which anyone may have written. Raises InvalidRequest."""
    if len(raw) > MAX_RECORD_BYTES:
        raise InvalidRequest("record", f"{len(raw)} bytes", f"more than {MAX_RECORD_BYTES} bytes")
    info = worker_pb2.WorkerInfo()
    try:
        info.ParseFromString(raw)
    except DecodeError:
        raise InvalidRequest("record", raw[:16], "is not a worker record") from None
    check(info, secret)
    return info


def _digest(info: worker_pb2.WorkerInfo, secret: bytes) -> bytes:
    unsigned = worker_pb2.WorkerInfo()
    unsigned.CopyFrom(info)
    unsigned.ClearField("signature")
    message = b"pl-work1" + unsigned.SerializeToString(deterministic=True)
    return hmac.digest(secret, message, "sha256")
