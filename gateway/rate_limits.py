"""What one tenant may use: requests and tokens a minute, requests at once.

A bucket holds a minute's worth and fills evenly. A prompt's tokens are taken when their number is
known, output as it comes, so a bucket may end in debt: running answers are never cut, and the next
request waits until the debt is paid. A prompt longer than a bucket waits for a full one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.core.errors import RateLimited


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and output
    max_running_requests: int | None = None


class Bucket:
    """`level` is what may be taken now; below 0 it is a debt."""

    __slots__ = ("_filled_s", "_per_s", "level", "size")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.size = float(per_minute)
        self.level = self.size
        self._per_s = per_minute / 60
        self._filled_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until `amount`, or a full bucket, may be taken; 0: now."""
        self._fill(now_s)
        missing = min(amount, self.size) - self.level
        return max(0.0, missing / self._per_s)

    def take(self, amount: float, now_s: float) -> None:
        self._fill(now_s)
        self.level -= amount

    def _fill(self, now_s: float) -> None:
        self.level = min(self.size, self.level + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s


class Meter:
    """Of one tenant, for as long as the process knows it."""

    def __init__(self, limits: TenantLimits, now_s: float) -> None:
        self.limits = limits
        self.num_running = 0
        self._requests = _bucket(limits.requests_per_minute, now_s)
        self._tokens = _bucket(limits.tokens_per_minute, now_s)

    def change_limits(self, limits: TenantLimits, now_s: float) -> None:
        """What was used stays used."""
        self.limits = limits
        self._requests = _bucket(limits.requests_per_minute, now_s, self._requests)
        self._tokens = _bucket(limits.tokens_per_minute, now_s, self._tokens)

    @contextmanager
    def request(self, now_s: float) -> Iterator[None]:
        """Around a request. Raises RateLimited."""
        most = self.limits.max_running_requests
        if most is not None and self.num_running >= most:
            raise RateLimited(f"{most} requests of this tenant are running", retry_after_s=1)
        _check(self._tokens, 1, now_s, "tokens")
        _check(self._requests, 1, now_s, "requests")
        if self._requests is not None:
            self._requests.take(1, now_s)
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    def take_prompt(self, num_tokens: int, now_s: float) -> None:
        """Raises RateLimited."""
        _check(self._tokens, num_tokens, now_s, "tokens")
        self.take_output(num_tokens, now_s)

    def take_output(self, num_tokens: int, now_s: float) -> None:
        if self._tokens is not None:
            self._tokens.take(num_tokens, now_s)


def _bucket(per_minute: int | None, now_s: float, before: Bucket | None = None) -> Bucket | None:
    if per_minute is None:
        return None
    bucket = Bucket(per_minute, now_s)
    if before is not None:
        before.take(0, now_s)  # so that it is filled until now
        bucket.level = min(before.level, bucket.size)
    return bucket


def _check(bucket: Bucket | None, amount: int, now_s: float, what: str) -> None:
    wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now_s)
    if bucket is not None and wait_s > 0:
        message = f"this tenant's limit of {bucket.size:g} {what} a minute is reached"
        raise RateLimited(message, retry_after_s=wait_s)
