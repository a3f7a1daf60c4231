"""Where the time of one request went, for metrics and for callers who ask.

    arrival ─ prepare ─ sent ─ queue ─ placed ─ prefill ─ first token ─ decode ─ last token
                                                          └ pull: copies into the decode worker

A request of several prompts runs them side by side: of each part the longest counts. Times of
other hosts are durations; no clocks are compared.
"""

from paceline.v1.common_pb2 import Emission
from paceline.v1.generate_pb2 import Statistics


class RequestTimes:
    """Filled in with the first emission of each choice and with those that tell of a pull, so that
    the others cost nothing. Seconds are of this process."""

    __slots__ = (
        "_prefill_us",
        "_pull_us",
        "_queue_us",
        "arrived_s",
        "decodes",
        "first_s",
        "is_sent",
        "last_s",
        "second_token_s",
        "sent_s",
    )

    def __init__(self, arrived_s: float) -> None:
        self.arrived_s = self.sent_s = arrived_s
        self.first_s: float | None = None
        self._queue_us = self._prefill_us = self._pull_us = 0
        self.is_sent = False
        self.decodes = True  # until a vector comes: embeddings have no such stage
        self.last_s = arrived_s  # when the last emission came
        self.second_token_s = 0.0  # the wait for the second token of a split request

    def sent(self, now_s: float) -> None:
        """To the router, all of it."""
        self.sent_s = self.last_s = now_s
        self.is_sent = True

    def first(self, emission: Emission, now_s: float) -> None:
        """The first emission of a choice."""
        if self.first_s is None:
            self.first_s = now_s
        if emission.HasField("prompt_times"):
            self._queue_us = max(self._queue_us, emission.prompt_times.queue_us)
            self._prefill_us = max(self._prefill_us, emission.prompt_times.prefill_us)
        self._pull_us = max(self._pull_us, emission.pull_us)

    def vector(self, emission: Emission, now_s: float) -> None:
        """The only emission of an input to embed: nothing is decoded after it."""
        self.first(emission, now_s)
        self.last_s, self.decodes = now_s, False

    def pulled(self, pull_us: int, waited_s: float) -> None:
        """A later emission tells how long pulls took; the one before came `waited_s` ago."""
        self._pull_us = max(self._pull_us, pull_us)
        self.second_token_s = max(self.second_token_s, waited_s)

    @property
    def has_token(self) -> bool:
        return self.first_s is not None

    @property
    def queue_s(self) -> float:
        return self._queue_us / 1e6

    @property
    def prefill_s(self) -> float:
        return self._prefill_us / 1e6

    @property
    def decode_s(self) -> float:
        if self.first_s is None or not self.decodes:
            return 0.0
        return max(0.0, self.last_s - self.first_s)

    def stages(self) -> dict[str, float]:
        """Seconds of each stage that there was."""
        found = {
            "prepare": max(0.0, self.sent_s - self.arrived_s),
            "queue": self.queue_s,
            "prefill": self.prefill_s,
        }
        if self.decodes:
            found["decode"] = self.decode_s
        if self._pull_us:
            found["pull"] = self._pull_us / 1e6
        if self.second_token_s:
            found["second_token"] = self.second_token_s
        return found

    def so_far(self, num_cached_tokens: int) -> Statistics:
        return Statistics(
            prepare_us=_us(self.sent_s - self.arrived_s),
            queue_us=self._queue_us,
            prefill_us=self._prefill_us,
            pull_us=self._pull_us,
            decode_us=_us(self.decode_s),
            total_us=_us(self.last_s - self.arrived_s),
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
