"""Who else holds the prefix of a request: hints for the worker that will compute it.

The worker decides by its own measurements whether it pulls; a planner that counts on it knows a
worker without the prefix to be nearly as good as one with it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.router.worker_session import WorkerSession

MAX_HINTS = 3


@dataclass(frozen=True, slots=True)
class Hint:
    """`num_blocks` leading blocks are in the pool of `source`; the reader itself has some of them,
    here or in a tier."""

    source: WorkerSession
    num_blocks: int
    num_own_blocks: int


Hints = tuple[Hint, ...]


def hints_for(num_own_blocks: int, holders: Iterable[tuple[WorkerSession, int]]) -> Hints:
    """The best first: most blocks, then least busy. `holders` have more than the reader."""
    found = [(num_blocks, source) for source, num_blocks in holders if source.lost is None]
    found.sort(key=lambda holder: (-holder[0], holder[1].num_running))
    best = found[:MAX_HINTS]
    return tuple(Hint(source, num_blocks, num_own_blocks) for num_blocks, source in best)
