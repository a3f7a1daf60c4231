"""Every error that crosses a boundary.

PacelineError
├── InvalidRequest          the caller's fault; names the field and its value
│   └── ContextLengthExceeded   prompt and max_tokens do not fit
├── InvalidApiKey           the caller is not known
├── ModelNotFound
├── RequestQuarantined      workers died of it
├── Overloaded              a bound is reached; carries retry_after_s
├── RateLimited             a tenant's own bound is reached; carries retry_after_s
├── Unavailable             nobody can serve it now; carries retry_after_s
├── DeadlineExceeded
├── Cancelled
├── KvUnavailable           KV could not be pulled or verified: plan again
│   ├── KvMismatch          what arrived is not what was promised
│   └── PeerGone            the source died or does not answer
├── IncompatiblePeer        digests differ; names the field
├── EngineFailure           our fault
└── ConfigError             a setting is wrong; names the field and its value
"""

from enum import StrEnum
from typing import Self


class ErrorCode(StrEnum):
    """Stable names, the same in proto (`ErrorCode`), gRPC details and OpenAI bodies."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_API_KEY = "invalid_api_key"
    MODEL_NOT_FOUND = "model_not_found"
    REQUEST_QUARANTINED = "request_quarantined"
    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limit_exceeded"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    KV_UNAVAILABLE = "kv_unavailable"
    INCOMPATIBLE_PEER = "incompatible_peer"
    INTERNAL = "internal"
    CONFIG = "config"


class PacelineError(Exception):
    """Root. `message` is meant for the caller: no paths, addresses or tracebacks in it."""

    code = ErrorCode.INTERNAL

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    @classmethod
    def relayed(
        cls, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> Self:
        """One that another process has raised: its text is ready."""
        error = cls.__new__(cls)
        PacelineError.__init__(error, message, field=field, retry_after_s=retry_after_s)
        return error


class _WrongField(PacelineError):
    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}={shown(value)}: {reason}", field=field)

    @classmethod
    def check(cls, field: str, value: object, holds: bool, reason: str) -> None:
        """Raises this error unless `holds`."""
        if not holds:
            raise cls(field, value, reason)


class InvalidRequest(_WrongField):
    code = ErrorCode.INVALID_REQUEST


class ContextLengthExceeded(InvalidRequest):
    code = ErrorCode.CONTEXT_LENGTH_EXCEEDED


class InvalidApiKey(PacelineError):
    code = ErrorCode.INVALID_API_KEY


class ModelNotFound(PacelineError):
    code = ErrorCode.MODEL_NOT_FOUND


class RequestQuarantined(PacelineError):
    code = ErrorCode.REQUEST_QUARANTINED


class Overloaded(PacelineError):
    code = ErrorCode.OVERLOADED


class RateLimited(PacelineError):
    code = ErrorCode.RATE_LIMITED


class Unavailable(PacelineError):
    code = ErrorCode.UNAVAILABLE


class DeadlineExceeded(PacelineError):
    code = ErrorCode.DEADLINE_EXCEEDED


class Cancelled(PacelineError):
    code = ErrorCode.CANCELLED


class KvUnavailable(PacelineError):
    code = ErrorCode.KV_UNAVAILABLE


class KvMismatch(KvUnavailable):
    pass


class PeerGone(KvUnavailable):
    pass


class IncompatiblePeer(PacelineError):
    code = ErrorCode.INCOMPATIBLE_PEER


class EngineFailure(PacelineError):
    pass


class ConfigError(_WrongField):
    code = ErrorCode.CONFIG


CLASS_OF_CODE: dict[ErrorCode, type[PacelineError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        ContextLengthExceeded,
        InvalidApiKey,
        ModelNotFound,
        RequestQuarantined,
        Overloaded,
        RateLimited,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        KvUnavailable,
        IncompatiblePeer,
    )
}  # as which an error is raised again that came from another process; the others: EngineFailure


def shown(value: object, limit: int = 80) -> str:
    """`value` for an error message: printable, one line, at most `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
