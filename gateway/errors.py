"""The one place where errors become HTTP statuses and OpenAI bodies."""

import math
from dataclasses import dataclass, field

import orjson

from paceline.core.errors import ErrorCode, InvalidRequest, PacelineError

CLIENT_CLOSED_REQUEST = 499
_DEFAULT_RETRY_AFTER_S = 1

_HTTP_STATUS = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.INVALID_API_KEY: 401,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.REQUEST_QUARANTINED: 422,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.RATE_LIMITED: 429,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.DEADLINE_EXCEEDED: 504,
    ErrorCode.CANCELLED: CLIENT_CLOSED_REQUEST,
    ErrorCode.KV_UNAVAILABLE: 503,
    ErrorCode.INCOMPATIBLE_PEER: 503,
}
_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}


class BodyTooLarge(InvalidRequest):
    """413."""


class BodyTooSlow(InvalidRequest):
    """408."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """A whole error answer."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def http_error(error: PacelineError) -> HttpError:
    """Status, OpenAI body and Retry-After of any error of ours."""
    status = http_status(error)
    headers = {}
    if status in (429, 503):
        retry_after_s = error.retry_after_s or _DEFAULT_RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return HttpError(status, error_body(error), headers)


def http_status(error: PacelineError) -> int:
    if isinstance(error, BodyTooLarge):
        return 413
    if isinstance(error, BodyTooSlow):
        return 408
    return _HTTP_STATUS.get(error.code, 500)


def error_body(error: PacelineError) -> bytes:
    """{"error": {message, type, param, code}}: a whole body, or the data of an SSE frame."""
    return body_of(http_status(error), error.message, error.field, error.code.value)


def body_of(status: int, message: str, param: str | None, code: str) -> bytes:
    default = "invalid_request_error" if status < 500 else "server_error"
    kind = _TYPES.get(status, default)
    content = {"message": message, "type": kind, "param": param, "code": code}
    return orjson.dumps({"error": content})
