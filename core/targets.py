"""What a caller hopes for of a request's times: plans keep to it, nothing is refused for it."""

from dataclasses import dataclass

from paceline.core.errors import InvalidRequest

MAX_TARGET_MS = 3_600_000.0


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """In milliseconds; 0: nothing was said."""

    ttft_ms: float = 0.0  # from the arrival to the first token
    itl_ms: float = 0.0  # from token to token, on average over the request

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        for name in ("ttft_ms", "itl_ms"):
            value = getattr(self, name)
            fits = 0 <= value <= MAX_TARGET_MS
            InvalidRequest.check(name, value, fits, f"must lie between 0 and {MAX_TARGET_MS:.0f}")


def checked_targets(ttft_ms: float | None, itl_ms: float | None) -> LatencyTargets:
    """Of a caller, for whom 0 is no way to say nothing. Raises InvalidRequest."""
    for name, value in (("ttft_ms", ttft_ms), ("itl_ms", itl_ms)):
        fits = value is None or 0 < value <= MAX_TARGET_MS
        InvalidRequest.check(name, value, fits, f"must be above 0, at most {MAX_TARGET_MS:.0f}")
    return LatencyTargets(ttft_ms or 0.0, itl_ms or 0.0)


NO_TARGETS = LatencyTargets()
