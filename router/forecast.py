"""What the planner's costs are worth: of each worker, the seconds until a prompt's first token.

The planner compares costs, in tokens of prefill. How far a cost is from what happens shows in
seconds alone: before each first token counts, its time is predicted by a line
through those before, of the same worker; recent ones weigh more.
"""

import math
from dataclasses import dataclass

FADE = 0.98  # of a first token's weight with each one after it
MIN_SEEN = 4  # first tokens before one is predicted
MAX_WORKERS = 1024
LEAST_S = 1e-3  # errors of less are no errors of a plan


@dataclass(slots=True)
class Line:
    """Weighted sums of costs x and seconds y."""

    seen: int = 0
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, cost: float, seconds: float) -> None:
        self.seen += 1
        self.weight = FADE * self.weight + 1
        self.x = FADE * self.x + cost
        self.y = FADE * self.y + seconds
        self.xx = FADE * self.xx + cost * cost
        self.xy = FADE * self.xy + cost * seconds

    def at(self, cost: float) -> float:
        spread = self.weight * self.xx - self.x * self.x
        together = self.weight * self.xy - self.x * self.y
        slope = max(0.0, together / spread) if spread > 1e-9 * self.weight * self.xx else 0.0
        return (self.y + slope * (self.weight * cost - self.x)) / self.weight


class Forecast:
    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}

    def error(self, worker_id: str, cost: float, seconds: float) -> float | None:
        """Of the prediction, as a share of `seconds`, which is learned; None: too few were seen."""
        if not (math.isfinite(cost) and seconds >= 0):
            return None
        line = self._lines.pop(worker_id, None) or Line()
        self._lines[worker_id] = line  # the latest are last
        if len(self._lines) > MAX_WORKERS:
            del self._lines[next(iter(self._lines))]
        predicted = line.at(cost) if line.seen >= MIN_SEEN else None
        line.add(cost, seconds)
        return None if predicted is None else abs(predicted - seconds) / max(seconds, LEAST_S)
