"""Messages of `proto/` to the words of `core/` and back: the one place where they meet."""

from paceline.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailure,
    ErrorCode,
    IncompatiblePeer,
    InvalidRequest,
    KvUnavailable,
    ModelNotFound,
    Overloaded,
    PacelineError,
    Unavailable,
)
from paceline.core.finish import FinishReason
from paceline.core.sampling import SamplingParams
from paceline.v1 import common_pb2

_CODE_TO_PROTO = {
    ErrorCode.INVALID_REQUEST: common_pb2.ERROR_CODE_INVALID_REQUEST,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.MODEL_NOT_FOUND: common_pb2.ERROR_CODE_MODEL_NOT_FOUND,
    ErrorCode.OVERLOADED: common_pb2.ERROR_CODE_OVERLOADED,
    ErrorCode.UNAVAILABLE: common_pb2.ERROR_CODE_UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED: common_pb2.ERROR_CODE_DEADLINE_EXCEEDED,
    ErrorCode.CANCELLED: common_pb2.ERROR_CODE_CANCELLED,
    ErrorCode.KV_UNAVAILABLE: common_pb2.ERROR_CODE_KV_UNAVAILABLE,
    ErrorCode.INCOMPATIBLE_PEER: common_pb2.ERROR_CODE_INCOMPATIBLE_PEER,
    ErrorCode.INTERNAL: common_pb2.ERROR_CODE_INTERNAL,
    ErrorCode.CONFIG: common_pb2.ERROR_CODE_INTERNAL,
}
_PROTO_TO_ERROR: dict[int, type[PacelineError]] = {
    common_pb2.ERROR_CODE_INVALID_REQUEST: InvalidRequest,
    common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED: ContextLengthExceeded,
    common_pb2.ERROR_CODE_MODEL_NOT_FOUND: ModelNotFound,
    common_pb2.ERROR_CODE_OVERLOADED: Overloaded,
    common_pb2.ERROR_CODE_UNAVAILABLE: Unavailable,
    common_pb2.ERROR_CODE_DEADLINE_EXCEEDED: DeadlineExceeded,
    common_pb2.ERROR_CODE_CANCELLED: Cancelled,
    common_pb2.ERROR_CODE_KV_UNAVAILABLE: KvUnavailable,
    common_pb2.ERROR_CODE_INCOMPATIBLE_PEER: IncompatiblePeer,
}
_FINISH_TO_PROTO = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}
_PROTO_TO_FINISH = {value: key for key, value in _FINISH_TO_PROTO.items()}


def error_to_proto(error: PacelineError) -> common_pb2.Error:
    return code_to_proto(error.code, error.message, error.field, error.retry_after_s)


def code_to_proto(
    code: ErrorCode, message: str, field: str | None = None, retry_after_s: float | None = None
) -> common_pb2.Error:
    retry_ms = round((retry_after_s or 0) * 1000)
    return common_pb2.Error(
        code=_CODE_TO_PROTO[code], message=message, field=field or "", retry_after_ms=retry_ms
    )


def error_from_proto(message: common_pb2.Error) -> PacelineError:
    kind = _PROTO_TO_ERROR.get(message.code, EngineFailure)
    error = kind.__new__(kind)  # InvalidRequest formats its own text; this text is formatted
    PacelineError.__init__(
        error,
        message.message,
        field=message.field or None,
        retry_after_s=message.retry_after_ms / 1000 or None,
    )
    return error


def finish_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason:
    return _FINISH_TO_PROTO[reason]


def finish_from_proto(value: common_pb2.FinishReason) -> FinishReason | None:
    return _PROTO_TO_FINISH[value]


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        n=params.n,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        num_logprobs=params.num_logprobs if params.num_logprobs >= 0 else None,
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest: a peer's message is checked like a caller's."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        n=message.n,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else -1,
    )
