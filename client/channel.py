"""Settings of a client's channel, its metadata, and errors as they were raised at the gateway."""

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from paceline.core.errors import (
    CLASS_OF_CODE,
    Cancelled,
    DeadlineExceeded,
    EngineFailure,
    ErrorCode,
    Overloaded,
    PacelineError,
    Unavailable,
)
from paceline.v1 import common_pb2

DEFAULT_TIMEOUT_S = 600.0
OPTIONS = [
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_TRAILER = "paceline-error-bin"
_OF_STATUS: dict[grpc.StatusCode, type[PacelineError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}


def metadata_of(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def error_of(failure: Any) -> PacelineError:
    """`failure`: a gRPC error. What the gateway said, or what its status means without a word."""
    for name, value in failure.trailing_metadata() or ():
        if name == _TRAILER:
            return _parsed(value)
    kind = _OF_STATUS.get(failure.code(), EngineFailure)
    return kind.relayed(failure.details() or failure.code().name)


def _parsed(trailer: bytes) -> PacelineError:
    try:
        error = common_pb2.Error.FromString(trailer)
        code = ErrorCode[common_pb2.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_")]
    except (DecodeError, KeyError, ValueError):
        return EngineFailure("the gateway's error cannot be read")
    return CLASS_OF_CODE.get(code, EngineFailure).relayed(
        error.message,
        field=error.field or None,
        retry_after_s=error.retry_after_ms / 1000 or None,
    )
