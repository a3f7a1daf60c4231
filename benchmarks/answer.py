"""Reads an answer of the HTTP API out of the bytes that arrived, with the time of each event."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import orjson

Piece = tuple[float, bytes]  # (wall-clock time of arrival, bytes)


@dataclass(frozen=True, slots=True)
class Event:
    """One `data:` of a stream, or the whole body of an answer in one piece."""

    at_s: float
    payload: dict[str, Any]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return self.payload.get("choices") or []

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the event, if the gateway was asked to tell (header x-paceline-timing)."""
        found: list[int] = self.payload.get("paceline", {}).get("token_ids", [])
        return found

    @property
    def emitted_s(self) -> float | None:
        """When the engine's step ended, if the gateway was asked to tell."""
        emitted = self.payload.get("paceline", {}).get("emitted_unix_us")
        return emitted / 1e6 if emitted else None


@dataclass(frozen=True, slots=True)
class Answer:
    sent_s: float
    status: int = 0
    events: tuple[Event, ...] = ()
    is_complete: bool = False  # ended as the protocol says, without an error in the stream
    has_left: bool = False  # the client hung up before the end
    error: str = ""

    def token_ids(self, choice: int = 0) -> list[int]:
        mine = (e for e in self.events if any(c["index"] == choice for c in e.choices))
        return [token for event in mine for token in event.token_ids]

    def text(self, choice: int = 0) -> str:
        return "".join(_text(part) for part in self._of(choice))

    def finish(self, choice: int = 0) -> str | None:
        reasons = [part.get("finish_reason") for part in self._of(choice)]
        return next((reason for reason in reasons if reason), None)

    @property
    def usage(self) -> dict[str, Any] | None:
        return next((e.payload["usage"] for e in self.events if e.payload.get("usage")), None)

    @property
    def token_times(self) -> list[float]:
        """Arrival of each event that carried tokens."""
        return [e.at_s for e in self.events if e.token_ids or any(map(_text, e.choices))]

    @property
    def ttft_s(self) -> float:
        """From sending to the first token; infinite when none came."""
        return self.token_times[0] - self.sent_s if self.token_times else float("inf")

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in pairwise(self.token_times)), default=0.0)

    def _of(self, choice: int) -> Iterator[dict[str, Any]]:
        return (c for event in self.events for c in event.choices if c.get("index", 0) == choice)


def read_answer(
    sent_s: float, pieces: list[Piece], *, has_left: bool = False, error: str = ""
) -> Answer:
    raw = b"".join(data for _, data in pieces)
    head, _, rest = raw.partition(b"\r\n\r\n")
    if not rest and not head.startswith(b"HTTP/1.1 "):
        return Answer(sent_s, has_left=has_left, error=error or "no answer")
    status = int(head[9:12])
    headers = head.lower()
    ends = list(accumulate(len(data) for _, data in pieces))
    parts = _parts(raw, len(head) + 4, b"transfer-encoding: chunked" in headers)
    timed = [(pieces[bisect_left(ends, end)][0], part) for end, part in parts]
    if b"content-type: text/event-stream" in headers:
        events, is_done, problem = _read_events(timed)
    else:
        events, is_done, problem = _read_body(timed)
    error = error or problem
    return Answer(sent_s, status, events, is_done and not error, has_left, error)


def _parts(raw: bytes, start: int, is_chunked: bool) -> Iterator[tuple[int, bytes]]:
    """(offset in `raw` after it, content) of each part of the body that is there in full."""
    if not is_chunked:
        yield len(raw), raw[start:]
        return
    while (line_end := raw.find(b"\r\n", start)) >= 0:
        begin = line_end + 2
        end = begin + int(raw[start:line_end], 16)
        if end == begin or end + 2 > len(raw):
            return
        yield end, raw[begin:end]
        start = end + 2


def _read_events(timed: list[Piece]) -> tuple[tuple[Event, ...], bool, str]:
    events: list[Event] = []
    buffer = b""
    for at_s, part in timed:
        *lines, buffer = (buffer + part).split(b"\n\n")
        for line in lines:
            data = line.removeprefix(b"data: ")
            if data == b"[DONE]":
                return tuple(events), True, ""
            if line.startswith(b":"):
                continue
            event = Event(at_s, orjson.loads(data))
            if "error" in event.payload:
                return tuple(events), False, _message(event.payload)
            events.append(event)
    return tuple(events), False, ""


def _read_body(timed: list[Piece]) -> tuple[tuple[Event, ...], bool, str]:
    body = b"".join(part for _, part in timed)
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError:
        return (), False, "the body is cut off"
    problem = _message(payload) if "error" in payload else ""
    return (Event(timed[-1][0], payload),), True, problem


def _message(payload: dict[str, Any]) -> str:
    return str(payload["error"].get("message", payload["error"]))


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or choice
    return part.get("content") or part.get("text") or ""
