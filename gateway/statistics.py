"""Where the time of one request went, for callers who ask by X-Paceline-Statistics.

    arrival ─ prepare ─ sent ─ queue ─ placed ─ prefill ─ first token ─ decode ─ last token
                                                          └ pull: copies into the decode worker

A request of several prompts runs them side by side: of each part the longest counts. Times of
other hosts are durations; no clocks are compared.
"""

from paceline.v1.common_pb2 import Emission
from paceline.v1.generate_pb2 import Statistics


class RequestTimes:
    """Filled in as emissions come. Seconds are of this process."""

    __slots__ = (
        "_arrived_s",
        "_first_s",
        "_last_s",
        "_prefill_us",
        "_pull_us",
        "_queue_us",
        "_sent_s",
    )

    def __init__(self, arrived_s: float, sent_s: float) -> None:
        self._arrived_s = arrived_s
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._last_s = sent_s
        self._queue_us = self._prefill_us = self._pull_us = 0

    def take(self, emission: Emission, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = now_s
        self._last_s = now_s
        if emission.HasField("prompt_times"):
            self._queue_us = max(self._queue_us, emission.prompt_times.queue_us)
            self._prefill_us = max(self._prefill_us, emission.prompt_times.prefill_us)
        self._pull_us = max(self._pull_us, emission.pull_us)

    def so_far(self, num_cached_tokens: int) -> Statistics:
        first_s = self._last_s if self._first_s is None else self._first_s
        return Statistics(
            prepare_us=_us(self._sent_s - self._arrived_s),
            queue_us=self._queue_us,
            prefill_us=self._prefill_us,
            pull_us=self._pull_us,
            decode_us=_us(self._last_s - first_s),
            total_us=_us(self._last_s - self._arrived_s),
            num_hit_tokens=num_cached_tokens,
        )


def json_fields(statistics: Statistics) -> dict[str, float | int]:
    """{prepare_ms, …, total_ms, hit_tokens}."""
    times = {f"{name}_ms": value / 1000 for name, value in _times(statistics)}
    return times | {"hit_tokens": statistics.num_hit_tokens}


def server_timing(statistics: Statistics) -> bytes:
    """The value of a Server-Timing header: milliseconds."""
    parts = [f"{name};dur={value / 1000:.3f}" for name, value in _times(statistics)]
    return ", ".join([*parts, f'hit;desc="{statistics.num_hit_tokens} tokens"']).encode()


def _times(statistics: Statistics) -> list[tuple[str, int]]:
    names = ("prepare", "queue", "prefill", "pull", "decode", "total")
    return [(name, getattr(statistics, f"{name}_us")) for name in names]


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
