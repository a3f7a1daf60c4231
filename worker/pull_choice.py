"""Whether a prefix that another worker holds is pulled, or computed again: one comparison.

    pull      latency of a pull from there + bytes / speed of the link (+ connecting, if need be)
    compute   tokens x seconds that a prompt token takes here

All of it is measured: by the pulls from that worker, by the steps of our rank. A figure that is old
may be wrong and would never be found wrong if nothing were pulled for it: then one pull is tried.
docs/routing.md tells what follows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

FIRST_LATENCY_S = 0.004  # before any pull was timed
CONNECT_S = 0.05
FIRST_TOKEN_S = 5e-5  # of a rank that has computed nothing yet
REMEASURE_S = 10.0
WEIGHT = 0.3  # of the newest pull in the latency


class Outcome(Enum):
    """What became of tokens that another worker holds: pulled, or computed here and why."""

    PULLED = "pulled"
    CHEAPER = "cheaper"  # to compute
    CONNECTING = "connecting"  # there is no link yet, and making one takes longer
    MISSING = "missing"  # it was no longer there
    REFUSED = "refused"  # its pins were taken, or our pages differ
    FAILED = "failed"  # source or link, or bytes that are wrong
    AVOIDED = "avoided"  # the source failed or refused a moment ago
    LATE = "late"  # pulled no faster than computed


@dataclass(frozen=True, slots=True)
class Price:
    """What the same blocks take either way."""

    pull_s: float
    compute_s: float

    @property
    def spared_s(self) -> float:
        return self.compute_s - self.pull_s


class LinkPrice:
    """What pulls over one link cost beside its speed, learned from them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.latency_s = FIRST_LATENCY_S
        self._measured_at = float("-inf")

    @property
    def is_doubtful(self) -> bool:
        return self._clock() - self._measured_at > REMEASURE_S

    def observe(self, took_s: float, link_s: float) -> None:
        """A pull is over, of which the link needed `link_s`."""
        self.latency_s += WEIGHT * (max(0.0, took_s - link_s) - self.latency_s)
        self._measured_at = self._clock()

    def observe_late(self, waited_s: float) -> None:
        """A pull took longer, nobody knows how much: a few of these, and none so long is tried."""
        self.observe(2 * waited_s, 0.0)


def compute_seconds(num_tokens: int, token_s: float) -> float:
    """`token_s`: of late; 0: not known."""
    return num_tokens * (token_s or FIRST_TOKEN_S)
