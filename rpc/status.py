"""Errors as gRPC statuses: each code maps to one, the whole error rides in a trailer."""

from typing import Any, NoReturn

import grpc

from paceline.core.errors import ErrorCode, PacelineError, Unavailable
from paceline.rpc.convert import error_from_proto, error_to_proto
from paceline.v1 import common_pb2

ERROR_TRAILER = "paceline-error-bin"

STATUS = {
    ErrorCode.INVALID_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
    ErrorCode.KV_UNAVAILABLE: grpc.StatusCode.ABORTED,
    ErrorCode.INCOMPATIBLE_PEER: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.CONFIG: grpc.StatusCode.INTERNAL,
}


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: PacelineError) -> NoReturn:
    """Ends the call with the status of `error`; the error itself goes along as a trailer."""
    trailer = (ERROR_TRAILER, error_to_proto(error).SerializeToString())
    await context.abort(STATUS[error.code], error.message, (trailer,))
    raise AssertionError("abort returned")


def error_of(failure: grpc.RpcError) -> PacelineError:
    """What a peer answered with `abort`; Unavailable when it is gone or does not say."""
    trailers: Any = failure.trailing_metadata() if isinstance(failure, grpc.Call) else None
    if isinstance(failure, grpc.aio.AioRpcError):
        trailers = failure.trailing_metadata()
    for name, value in trailers or ():
        if name == ERROR_TRAILER:
            return error_from_proto(common_pb2.Error.FromString(value))
    return Unavailable("the peer does not answer")
