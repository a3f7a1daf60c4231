"""How much of what fails is tried again: no more than a share of what succeeds, beyond what was in
flight when it began. A fault of all workers then costs each request one attempt more at first, and
a fifth of one later, instead of `max_attempts`."""

SHARE = 0.2  # retries that each request which succeeds allows
PER_S = 1.0  # that are always allowed
LEAST = 50  # that may be owed where little is in flight


class RetryBudget:
    """`owed`: retries that were made and not earned yet."""

    def __init__(self, now: float) -> None:
        self.owed = 0.0
        self._earned_at = now

    def earn(self) -> None:
        """A request has succeeded."""
        self.owed = max(0.0, self.owed - SHARE)

    def take(self, now: float, num_in_flight: int, *, has_output: bool) -> bool:
        """Whether a request may be tried again. Those whose clients have seen nothing yet go up to
        half of what is there, and leave the rest to streams."""
        self.owed = max(0.0, self.owed - PER_S * (now - self._earned_at))
        self._earned_at = now
        most = max(LEAST, num_in_flight) * (1.0 if has_output else 0.5)
        if self.owed + 1 > most:
            return False
        self.owed += 1
        return True
