"""Who else holds the prefix of a request: hints for the worker that will compute it.

The worker decides by its own measurements whether it pulls; a planner that counts on it knows a
worker without the prefix to be nearly as good as one with it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.keys import HASH_BLOCK_TOKENS
from paceline.router.planner import PULL_COST
from paceline.router.worker_session import WorkerSession

MAX_HINTS = 3
WEIGHT = 0.1  # of the newest answer in what is known of pulls

W = TypeVar("W")


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


class PullYield:
    """How much of what hints promise workers do pull, learned from what they report. So long as
    that is nothing, plans count on nothing."""

    def __init__(self) -> None:
        self.share = 0.0

    def observe(self, hints: Hints, num_cached_tokens: int) -> None:
        """A worker with these hints had so many tokens of the prompt not to compute."""
        if hints:
            own, most = hints[0].num_own_blocks, hints[0].num_blocks
            pulled = (num_cached_tokens / HASH_BLOCK_TOKENS - own) / (most - own)
            self.share += WEIGHT * (min(1.0, max(0.0, pulled)) - self.share)

    def spared(
        self, cached: Mapping[W, int], workers: Iterable[W], num_elsewhere: int
    ) -> Mapping[W, int]:
        """Tokens that each of `workers` has or would be spared by a pull, when `num_elsewhere` are
        the most that any pool holds."""
        worth = self.share * (1.0 - PULL_COST)
        if not worth or not num_elsewhere:
            return cached
        found = {}
        for worker in workers:
            own = cached.get(worker, 0)
            more = num_elsewhere - own
            found[worker] = own + int(worth * more) if more > 0 else own
        return found
