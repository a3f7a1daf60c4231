"""Messages of `proto/` to the words of `core/` and back: the one place where they meet."""

from collections.abc import Iterable

from paceline.core.errors import (
    CLASS_OF_CODE,
    EngineFailure,
    ErrorCode,
    InvalidRequest,
    PacelineError,
)
from paceline.core.finish import FinishReason
from paceline.core.pooling import Pooling
from paceline.core.sampling import LogitsProcessorCall, SamplingParams
from paceline.v1 import common_pb2, worker_pb2

_CODE_TO_PROTO = {
    ErrorCode.INVALID_REQUEST: common_pb2.ERROR_CODE_INVALID_REQUEST,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
    ErrorCode.MODEL_NOT_FOUND: common_pb2.ERROR_CODE_MODEL_NOT_FOUND,
    ErrorCode.REQUEST_QUARANTINED: common_pb2.ERROR_CODE_REQUEST_QUARANTINED,
    ErrorCode.OVERLOADED: common_pb2.ERROR_CODE_OVERLOADED,
    ErrorCode.UNAVAILABLE: common_pb2.ERROR_CODE_UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED: common_pb2.ERROR_CODE_DEADLINE_EXCEEDED,
    ErrorCode.CANCELLED: common_pb2.ERROR_CODE_CANCELLED,
    ErrorCode.KV_UNAVAILABLE: common_pb2.ERROR_CODE_KV_UNAVAILABLE,
    ErrorCode.INCOMPATIBLE_PEER: common_pb2.ERROR_CODE_INCOMPATIBLE_PEER,
    ErrorCode.INTERNAL: common_pb2.ERROR_CODE_INTERNAL,
    ErrorCode.INVALID_API_KEY: common_pb2.ERROR_CODE_INVALID_API_KEY,
    ErrorCode.RATE_LIMITED: common_pb2.ERROR_CODE_RATE_LIMITED,
    ErrorCode.CONFIG: common_pb2.ERROR_CODE_INTERNAL,
}
_PROTO_TO_ERROR: dict[int, type[PacelineError]] = {
    _CODE_TO_PROTO[code]: kind for code, kind in CLASS_OF_CODE.items()
}
_FINISH_TO_PROTO = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}
_PROTO_TO_FINISH = {value: key for key, value in _FINISH_TO_PROTO.items()}
_POOLING_TO_PROTO = {
    Pooling.LAST: common_pb2.POOLING_LAST,
    Pooling.MEAN: common_pb2.POOLING_MEAN,
}
_PROTO_TO_POOLING = {value: key for key, value in _POOLING_TO_PROTO.items()}


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
    return kind.relayed(
        message.message,
        field=message.field or None,
        retry_after_s=message.retry_after_ms / 1000 or None,
    )


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
        num_logprobs=_count_to_proto(params.num_logprobs),
        num_prompt_logprobs=_count_to_proto(params.num_prompt_logprobs),
        min_p=params.min_p,
        typical_p=params.typical_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        bad_words=[common_pb2.TokenIds(ids=word) for word in params.bad_words],
        logits_processors=[
            common_pb2.LogitsProcessor(name=call.name, arguments=call.arguments)
            for call in params.logits_processors
        ],
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Raises InvalidRequest: a peer's message is checked like a caller's."""
    given = message.HasField
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        min_p=message.min_p,
        top_k=message.top_k,
        top_p=message.top_p,
        typical_p=message.typical_p if given("typical_p") else 1.0,
        seed=message.seed,
        n=message.n,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        num_logprobs=message.num_logprobs if given("num_logprobs") else -1,
        num_prompt_logprobs=message.num_prompt_logprobs if given("num_prompt_logprobs") else -1,
        repetition_penalty=message.repetition_penalty if given("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        logits_processors=calls_from_proto(message.logits_processors),
    )


def wanted_of(message: common_pb2.TokenRequest) -> tuple[SamplingParams, Pooling | None]:
    """What a request asks for: tokens, or an embedding, whose sampling is one choice of no use.

    Raises InvalidRequest."""
    if message.WhichOneof("wanted") != "pooling":
        return sampling_from_proto(message.sampling), None
    return SamplingParams(max_tokens=1), pooling_from_proto(message.pooling)


def pooling_to_proto(pooling: Pooling) -> common_pb2.Pooling:
    return _POOLING_TO_PROTO[pooling]


def pooling_from_proto(value: common_pb2.Pooling) -> Pooling:
    """Raises InvalidRequest."""
    if value not in _PROTO_TO_POOLING:
        raise InvalidRequest("pooling", value, f"must be one of {sorted(_PROTO_TO_POOLING)}")
    return _PROTO_TO_POOLING[value]


def role_name(role: worker_pb2.Role) -> str:
    """As commands, metrics and logs name it."""
    return worker_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def calls_from_proto(
    messages: Iterable[common_pb2.LogitsProcessor],
) -> tuple[LogitsProcessorCall, ...]:
    """Raises InvalidRequest."""
    return tuple(LogitsProcessorCall(call.name, call.arguments or "{}") for call in messages)


def _count_to_proto(count: int) -> int | None:
    """Negative: none is asked for."""
    return count if count >= 0 else None
