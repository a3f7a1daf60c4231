"""Log probabilities in OpenAI's two shapes. JSON has no infinities: impossible tokens are -9999."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from paceline.core.errors import InvalidRequest
from paceline.core.sampling import MAX_TOP_LOGPROBS
from paceline.gateway.choice import Delta
from paceline.v1.common_pb2 import PositionLogprobs, TokenLogprob

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


class JsonList:
    """A list encoded part by part: as objects it would take several times the memory, and to encode
    all of it at once would hold up the event loop."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def extend(self, items: list[Any]) -> None:
        if items:
            self._parts.append(orjson.dumps(items)[1:-1])

    def join(self, other: "JsonList") -> None:
        self._parts.extend(other._parts)

    def content(self) -> orjson.Fragment:
        return orjson.Fragment(b"[" + b",".join(self._parts) + b"]")


class ChatLogprobs:
    """{content, refusal} of a choice, one entry a token."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._entries = JsonList()

    def add(self, delta: Delta) -> None:
        self._entries.extend(chat_entries(delta, self._token_bytes))

    def content(self) -> dict[str, Any]:
        return {"content": self._entries.content(), "refusal": None}


class CompletionLogprobs:
    """{tokens, token_logprobs, top_logprobs, text_offset}: parallel lists, as in the old API."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._tokens = JsonList()
        self._logprobs = JsonList()
        self._top = JsonList()
        self._has_top = False
        self._offsets = JsonList()

    def add(self, delta: Delta, first_offset: int = 0) -> None:
        """`first_offset`: characters before the output."""
        offsets = [first_offset + offset for offset in delta.text_offsets]
        self.add_positions(delta.logprobs, offsets)

    def add_positions(
        self,
        positions: Sequence[PositionLogprobs],
        offsets: Sequence[int],
        num_top: int = MAX_TOP_LOGPROBS,
    ) -> None:
        self._tokens.extend([self._name(p.chosen.token_id) for p in positions])
        self._logprobs.extend([finite(p.chosen.logprob) for p in positions])
        tops = [p.top[:num_top] for p in positions]
        self._top.extend([{self._name(t.token_id): finite(t.logprob) for t in top} for top in tops])
        self._has_top = self._has_top or any(tops)
        self._offsets.extend(list(offsets[: len(positions)]))

    def add_unknown(self, token_id: int, offset: int) -> None:
        """A token without any."""
        self._tokens.extend([self._name(token_id)])
        self._logprobs.extend([None])
        self._top.extend([None])
        self._offsets.extend([offset])

    def extend(self, other: "CompletionLogprobs") -> None:
        """With those of tokens that follow, which are ready."""
        self._tokens.join(other._tokens)
        self._logprobs.join(other._logprobs)
        self._top.join(other._top)
        self._has_top = self._has_top or other._has_top
        self._offsets.join(other._offsets)

    def content(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens.content(),
            "token_logprobs": self._logprobs.content(),
            "top_logprobs": self._top.content() if self._has_top else None,
            "text_offset": self._offsets.content(),
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
