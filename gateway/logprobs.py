"""Log probabilities in OpenAI's two shapes. JSON has no infinities: impossible tokens are -9999."""

import math
from collections.abc import Callable
from typing import Any

from paceline.core.errors import InvalidRequest
from paceline.core.sampling import MAX_TOP_LOGPROBS
from paceline.gateway.choice import Delta
from paceline.v1.common_pb2 import TokenLogprob

_IMPOSSIBLE = -9999.0

TokenBytes = Callable[[int], bytes]


def chat_entries(delta: Delta, token_bytes: TokenBytes) -> list[dict[str, Any]]:
    """One entry a token: {token, logprob, bytes, top_logprobs}."""
    entries = []
    for position in delta.logprobs:
        entry = _chat_token(position.chosen, token_bytes)
        entry["top_logprobs"] = [_chat_token(token, token_bytes) for token in position.top]
        entries.append(entry)
    return entries


def checked_count(field: str, count: int) -> int:
    """Of tokens asked for by a field of this name: elsewhere ours is blamed."""
    reason = f"must lie between 0 and {MAX_TOP_LOGPROBS}"
    InvalidRequest.check(field, count, 0 <= count <= MAX_TOP_LOGPROBS, reason)
    return count


class CompletionLogprobs:
    """{tokens, token_logprobs, top_logprobs, text_offset}: parallel lists, as in the old API."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._tokens: list[str] = []
        self._logprobs: list[float] = []
        self._top: list[dict[str, float]] = []
        self._offsets: list[int] = []

    def add(self, delta: Delta) -> None:
        for position, offset in zip(delta.logprobs, delta.text_offsets, strict=False):
            self._tokens.append(self._name(position.chosen.token_id))
            self._logprobs.append(finite(position.chosen.logprob))
            self._top.append({self._name(t.token_id): finite(t.logprob) for t in position.top})
            self._offsets.append(offset)

    def content(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._top if any(self._top) else None,
            "text_offset": self._offsets,
        }

    def _name(self, token_id: int) -> str:
        """The token's text; tokens that are no UTF-8 by themselves as bytes:\\xNN."""
        raw = self._token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _chat_token(token: TokenLogprob, token_bytes: TokenBytes) -> dict[str, Any]:
    raw = token_bytes(token.token_id)
    return {
        "token": raw.decode(errors="replace"),
        "logprob": finite(token.logprob),
        "bytes": list(raw),
    }


def finite(value: float) -> float:
    return value if math.isfinite(value) else _IMPOSSIBLE
