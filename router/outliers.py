"""Workers that are alive and fail what they are given: they get nothing for a while, then one
request to show that they are well."""

import random

MIN_FAILURES = 5  # in a row
EJECTED_S = (2.0, 60.0)  # at first, and at most; it doubles with each request that fails after it
JITTER = 0.25  # of that: routers shall not all come back at once


class Health:
    """Of one incarnation, as one router sees it."""

    __slots__ = ("_num_ejections", "ejected_until", "is_tried", "num_failures")

    def __init__(self) -> None:
        self.num_failures = 0  # since the last success
        self.ejected_until = 0.0
        self.is_tried = False  # it was ejected, and has not succeeded since
        self._num_ejections = 0  # in a row

    def fail(self) -> bool:
        """Whether it is time to eject it."""
        self.num_failures += 1
        return self.is_tried or self.num_failures >= MIN_FAILURES

    def succeed(self) -> None:
        self.num_failures = self._num_ejections = 0
        self.ejected_until, self.is_tried = 0.0, False

    def eject(self, now: float) -> float:
        """Returns for how long."""
        first_s, most_s = EJECTED_S
        usual_s = min(most_s, first_s * 2.0**self._num_ejections)
        pause_s = usual_s * random.uniform(1 - JITTER, 1 + JITTER)
        self._num_ejections = min(self._num_ejections + 1, 16)
        self.ejected_until, self.is_tried = now + pause_s, True
        return pause_s

    def may_take(self, now: float, num_in_flight: int) -> bool:
        return now >= self.ejected_until and not (self.is_tried and num_in_flight)
