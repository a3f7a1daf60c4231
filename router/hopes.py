"""What a prompt does to streams whose requests hope for a time between tokens, and to its own hope.

A stream has slack: how much longer its steps so far could have taken. A prompt that is computed
beside it takes of that. One that falls below zero has missed its hope if it ends now; with each
step that brings it a token sooner it comes back. So by how far it is below says how likely it is to
end there: for certain when it is RECOVERY_S.

Nobody gains by hoping for what cannot be: a stream that asks for tokens faster than the shortest
steps of its worker bring them counts as one that says nothing, and the doubt of a first token is
never more than the time that it is hoped for in.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

RECOVERY_S = 3.0
DOUBT_S = 0.5  # of the prediction of a first token: at most so much more or less


@dataclass(slots=True)
class _Alike:
    """Streams that hope for the same time between tokens."""

    num_waiting: int = 0  # for their first token
    origins: list[float] = field(default_factory=list)  # of the others, in order


class Hopes:
    """Of a worker's streams. Slack is  itl_s x step - now + origin, so that in the order of their
    origins those below a limit are found at once."""

    def __init__(self) -> None:
        self._alike: dict[float, _Alike] = {}  # by itl_s

    def add(self, itl_s: float, origin: float | None) -> None:
        """`origin`: when its first token came, less `itl_s` x the worker's steps by then; None: it
        has not come."""
        alike = self._alike.setdefault(itl_s, _Alike())
        if origin is None:
            alike.num_waiting += 1
        else:
            insort(alike.origins, origin)

    def remove(self, itl_s: float, origin: float | None) -> None:
        """One that was added."""
        alike = self._alike[itl_s]
        if origin is None:
            alike.num_waiting -= 1
        else:
            del alike.origins[bisect_left(alike.origins, origin)]
        if not alike.num_waiting and not alike.origins:
            del self._alike[itl_s]

    def misses(
        self,
        step: int,
        now: float,
        step_s: float,
        ahead_s: float,
        prompt_s: float,
        least_s: float = 0.0,
    ) -> float:
        """How many streams a prompt of `prompt_s`, after `ahead_s` of others, makes miss theirs.

        `step`: the last one of their worker. `step_s`: of those with prompts, each of which brings
        every stream a token; `least_s`: of its shortest ones, which no hope is below.
        """
        missed, both_s = 0.0, ahead_s + prompt_s
        for itl_s, alike in self._alike.items():
            if not least_s <= itl_s < step_s:
                continue
            lost = 1 - itl_s / step_s  # of each second
            before_s, after_s = lost * ahead_s, lost * both_s
            if alike.num_waiting:
                missed += alike.num_waiting * (_share(after_s) - _share(before_s))
            passed_s = itl_s * step - now
            missed += _shares(alike.origins, after_s - passed_s)
            missed -= _shares(alike.origins, before_s - passed_s)
        return missed


def _shares(origins: list[float], limit: float) -> float:
    """Sum over streams below zero when what is lost is as much as that origin. In compiled loops:
    it is done twice for each of eight workers, in each decision."""
    num_lost = bisect_right(origins, limit - RECOVERY_S)  # for certain
    below = origins[num_lost : bisect_left(origins, limit, num_lost)]
    return num_lost + (len(below) * limit - sum(below)) / RECOVERY_S


def _share(below_s: float) -> float:
    """Of a stream that is so far below zero."""
    return min(1.0, max(0.0, below_s / RECOVERY_S))


def chance_of_late(left_s: float, doubt_s: float = DOUBT_S) -> float:
    """That a first token is late which is predicted `left_s` before it is due."""
    return min(1.0, max(0.0, 0.5 - left_s / (2 * doubt_s)))
