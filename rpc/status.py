"""Errors as gRPC statuses: each code maps to one, the whole error rides in a trailer."""

from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from paceline.core.errors import (
    ErrorCode,
    IncompatiblePeer,
    Overloaded,
    PacelineError,
    Unavailable,
)
from paceline.core.tls_reasons import known_reason
from paceline.rpc.convert import error_from_proto, error_to_proto
from paceline.v1 import common_pb2

ERROR_TRAILER = "paceline-error-bin"
_CUT_OFF = (
    "the peer closes connections at once: it asks for TLS, or refuses our certificate (its time,"
    " PACELINE_TLS_CA of the peer)"
)

STATUS = {
    ErrorCode.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.REQUEST_QUARANTINED: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.KV_UNAVAILABLE: grpc.StatusCode.ABORTED,
    ErrorCode.INCOMPATIBLE_PEER: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.INVALID_API_KEY: grpc.StatusCode.UNAUTHENTICATED,
    ErrorCode.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.CONFIG: grpc.StatusCode.INTERNAL,
}


async def abort(
    context: "grpc.aio.ServicerContext[Any, Any]",
    error: PacelineError,
    status: grpc.StatusCode | None = None,
) -> NoReturn:
    """Ends the call with the status of `error`; the error itself goes along as a trailer."""
    trailer = (ERROR_TRAILER, error_to_proto(error).SerializeToString())
    await context.abort(status or STATUS[error.code], error.message, (trailer,))
    raise AssertionError("abort returned")


def error_of(failure: grpc.RpcError) -> PacelineError:
    """What a peer answered with `abort`; without its word Overloaded when gRPC itself refused the
    call at a bound, IncompatiblePeer when TLS does, Unavailable when the peer is gone or broken."""
    answer: Any = failure if isinstance(failure, grpc.Call | grpc.aio.AioRpcError) else None
    for name, value in (answer and answer.trailing_metadata()) or ():
        if name == ERROR_TRAILER:
            return _parsed(value)
    if answer and answer.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded("the peer has too many calls under way", retry_after_s=0.1)
    details = (answer and answer.details()) or ""
    if reason := known_reason(details):
        return IncompatiblePeer(reason, field="tls")
    return Unavailable(_CUT_OFF if _is_cut_off(details) else "the peer does not answer")


def tells_end(failure: grpc.RpcError) -> bool:
    """Whether a peer that was there has ended: nobody listens at its place, or who does says that
    there is nothing to attach to."""
    answer: Any = failure if isinstance(failure, grpc.Call | grpc.aio.AioRpcError) else None
    if answer is None or answer.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    has_word = any(name == ERROR_TRAILER for name, _ in answer.trailing_metadata() or ())
    return has_word or "Connection refused" in (answer.details() or "")


def _is_cut_off(details: str) -> bool:
    """Before anything was said: a server that refuses a handshake says no more than that."""
    return details.startswith("failed to connect") and details.endswith("Socket closed")


def _parsed(trailer: bytes) -> PacelineError:
    try:
        return error_from_proto(common_pb2.Error.FromString(trailer))
    except DecodeError:
        return Unavailable("the peer's error cannot be read")
