"""What one tenant may use: requests and tokens a minute, requests at once.

A bucket holds a minute's worth and fills evenly. A prompt's tokens are taken when their number is
known, output as it comes, so a bucket may end in debt: running answers are never cut, and the next
request waits until the debt is paid. A prompt longer than a bucket waits for a full one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.core.errors import RateLimited
from paceline.gateway.usage import FULL, Level, OwnUsage, Usage


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and output
    max_running_requests: int | None = None


class Bucket:
    """`level` is what may be taken now; below 0 it is a debt. `kept`: the level and its time, from
    before, where others may see them."""

    __slots__ = ("_kept", "_per_s", "size")

    def __init__(self, per_minute: int, now_s: float, kept: Level | None = None) -> None:
        self.size = float(per_minute)
        self._per_s = per_minute / 60
        self._kept = OwnUsage().tokens if kept is None else kept
        self._fill(now_s)

    @property
    def level(self) -> float:
        return self._kept[0]

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until `amount`, or a full bucket, may be taken; 0: now."""
        self._fill(now_s)
        missing = min(amount, self.size) - self.level
        return max(0.0, missing / self._per_s)

    def take(self, amount: float, now_s: float) -> None:
        self._fill(now_s)
        self._kept[0] -= amount

    def _fill(self, now_s: float) -> None:
        level, filled_s = self._kept
        elapsed_s = max(0.0, now_s - filled_s)  # another process may have a later time
        self._kept[0] = min(self.size, level + elapsed_s * self._per_s)
        self._kept[1] = max(now_s, filled_s)


class Meter:
    """Of one tenant, for as long as the process knows it."""

    def __init__(self, limits: TenantLimits, now_s: float, usage: Usage | None = None) -> None:
        self.limits = limits
        self._usage: Usage = usage or OwnUsage()
        with self._usage.locked():
            self._make_buckets(now_s)

    def change_limits(self, limits: TenantLimits, now_s: float) -> None:
        """What was used stays used."""
        self.limits = limits
        with self._usage.locked():
            for bucket in filter(None, (self._requests, self._tokens)):
                bucket.take(0, now_s)  # so that it is filled until now
            self._make_buckets(now_s)

    @contextmanager
    def request(self, now_s: float) -> Iterator[None]:
        """Around a request. Raises RateLimited."""
        with self._usage.locked():
            most = self.limits.max_running_requests
            if most is not None and self._usage.num_running >= most:
                message = f"{most} requests of this tenant are running"
                raise RateLimited(message, retry_after_s=1)
            _check(self._tokens, 1, now_s, "tokens")
            _check(self._requests, 1, now_s, "requests")
            if self._requests is not None:
                self._requests.take(1, now_s)
            self._usage.count(1)
        try:
            yield
        finally:
            self._usage.count(-1)

    def take_prompt(self, num_tokens: int, now_s: float) -> None:
        """Raises RateLimited."""
        if self._tokens is not None:
            with self._usage.locked():
                _check(self._tokens, num_tokens, now_s, "tokens")
                self._tokens.take(num_tokens, now_s)

    def take_output(self, num_tokens: int, now_s: float) -> None:
        if self._tokens is not None:
            with self._usage.locked():
                self._tokens.take(num_tokens, now_s)

    def _make_buckets(self, now_s: float) -> None:
        limits, usage = self.limits, self._usage
        self._requests = _bucket(limits.requests_per_minute, now_s, usage.requests)
        self._tokens = _bucket(limits.tokens_per_minute, now_s, usage.tokens)


def _bucket(per_minute: int | None, now_s: float, kept: Level) -> Bucket | None:
    if per_minute is None:
        kept[0] = FULL  # a limit that comes later begins with a full one
        return None
    return Bucket(per_minute, now_s, kept)


def _check(bucket: Bucket | None, amount: int, now_s: float, what: str) -> None:
    wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now_s)
    if bucket is not None and wait_s > 0:
        message = f"this tenant's limit of {bucket.size:g} {what} a minute is reached"
        raise RateLimited(message, retry_after_s=wait_s)
