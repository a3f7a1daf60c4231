"""What a prompt does to streams whose requests hope for a time between tokens, and to its own hope.

A stream has slack: how much longer its steps so far could have taken. A prompt that is computed
beside it takes of that. One that falls below zero has missed its hope if it ends now; with each
step that brings it a token sooner it comes back. So by how far it is below says how likely it is to
end there: for certain when it is RECOVERY_S.

Nobody gains by hoping for what cannot be: a stream that asks for tokens faster than the shortest
steps of its worker bring them counts as one that says nothing, and the doubt of a first token is
never more than the time that it is hoped for in.
"""

from collections.abc import Iterable
from typing import Protocol

RECOVERY_S = 3.0
DOUBT_S = 0.5  # of the prediction of a first token: at most so much more or less


class Stream(Protocol):
    @property
    def hoped_itl_s(self) -> float:
        """From token to token; 0: nothing was said."""

    @property
    def began_at(self) -> float:
        """When its first token came; 0: not yet."""

    @property
    def began_step(self) -> int:
        """Of its worker, then."""


def expected_misses(
    streams: Iterable[Stream],
    step: int,
    now: float,
    step_s: float,
    ahead_s: float,
    prompt_s: float,
    least_s: float = 0.0,
) -> float:
    """How many streams a prompt of `prompt_s`, after `ahead_s` of others, makes miss their hope.

    `step`: the last one of their worker. `step_s`: of those with prompts, each of which brings
    every stream a token; `least_s`: of its shortest ones, which no hope is below. Plain: it is
    done for each stream of eight workers, in each decision.
    """
    missed, both_s = 0.0, ahead_s + prompt_s
    for stream in streams:
        itl_s, began_at = stream.hoped_itl_s, stream.began_at
        if itl_s and least_s <= itl_s < step_s:
            lost = 1 - itl_s / step_s  # of each second
            slack_s = itl_s * (step - stream.began_step) - (now - began_at) if began_at else 0.0
            after_s = slack_s - lost * both_s
            if after_s < 0:
                before_s = after_s + lost * prompt_s
                missed += min(1.0, -after_s / RECOVERY_S) - min(
                    1.0, max(0.0, -before_s / RECOVERY_S)
                )
    return missed


def chance_of_late(left_s: float, doubt_s: float = DOUBT_S) -> float:
    """That a first token is late which is predicted `left_s` before it is due."""
    return min(1.0, max(0.0, 0.5 - left_s / (2 * doubt_s)))
