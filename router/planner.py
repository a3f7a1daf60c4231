"""Where a request runs: pure functions from what the router knows to a plan.

Cost is counted in tokens of prefill, the currency of time to first token:

    waiting tokens ahead + uncached tokens            what the request itself waits for
    + RUNNING_TOKENS x sequences running              the slow-down that it meets and causes
    + what this router sent since the last report x HERD_FACTOR   others saw the same report
    + BALANCE x tokens x share above fair             so that one warm worker is not the only one

Candidates are the one with the longest cached prefix and two drawn at random (power of two
choices); of those within NEAR_TOKENS of the cheapest, the least busy one is taken, ties by lot.
Only who is drawn is looked at, so that a decision among 512 workers costs little more than one
among 8. docs/routing.md explains the terms.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from paceline.core.kv_layout import PAGE_TOKENS

RUNNING_TOKENS = 32
HERD_FACTOR = 4
BALANCE = 1.5
FAIR_SHARE_SLACK = 1.15  # shares up to here cost nothing: sessions stay where their KV is
NEAR_TOKENS = 48
FIRST_DRAWN = 4  # at most; two of them are taken, if they can take the job
PULL_COST = 0.125  # of a token pulled, in tokens computed


class Candidate(NamedTuple):
    """What the router knows of a worker that may take this request now."""

    worker: str
    is_prefill: bool
    num_cached_tokens: int = 0  # of this request, by the index
    num_waiting_tokens: int = 0  # to compute before it
    num_unreported_tokens: int = 0  # sent by this router since the worker's last frame
    num_running: int = 0
    num_free_pages: int = 1 << 30
    num_pages: int = 1 << 30
    most_pages: tuple[int, ...] = (0,)  # of a sequence by page group; 0: by its length alone
    recent_share: float = 1.0  # of recent requests; 1 is fair


@dataclass(frozen=True, slots=True)
class Job:
    """The part of a request that a plan depends on."""

    num_tokens: int  # prompt and forced tokens
    num_remaining: int  # output tokens that may still come; 0: an embedding
    num_choices: int = 1
    avoid: frozenset[str] = field(default_factory=frozenset)  # failed it before: last resort
    may_split: bool = True

    def num_pages_on(self, candidate: Candidate) -> int:
        num_blocks = -(-self.num_tokens // PAGE_TOKENS) + self.num_choices
        return sum(min(num_blocks, most or num_blocks) for most in candidate.most_pages)


class Cost(NamedTuple):
    """The terms of a candidate's cost, each in tokens of prefill."""

    uncached: float  # what the request itself computes or pulls
    waiting: float  # to compute before it
    unreported: float  # sent since the worker's last report, which others saw, too
    running: float  # sequences that step together with it
    balance: float  # above its fair share of recent requests

    @property
    def total(self) -> float:
        return self.uncached + self.waiting + self.unreported + self.running + self.balance


Considered = tuple[Candidate, Cost]


@dataclass(frozen=True, slots=True)
class Whole:
    """Prefill and decode on one worker."""

    worker: Candidate
    considered: tuple[Considered, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Split:
    """Prefill on one worker; the other pulls the KV and decodes."""

    prefill: Candidate
    decode: Candidate
    considered: tuple[Considered, ...] = field(default=(), compare=False, repr=False)


Plan = Whole | Split
W = TypeVar("W")


def draw(
    job: Job,
    workers: Sequence[W],
    warmest: Iterable[W],
    describe: Callable[[W], Candidate | None],
    rng: random.Random,
) -> list[Candidate]:
    """Two of `workers` at random, and the first of `warmest`, of those that can take the job.

    `describe` is asked for those alone that come up; None: it can take nothing now. Who failed the
    job before is drawn only when there is nobody else.
    """
    drawn: dict[str, Candidate] = {}
    avoided: dict[str, Candidate] = {}

    def take(those: Iterable[W], num_more: int) -> None:
        for worker in those:
            candidate = describe(worker)
            if candidate is None or not has_room(candidate, job):
                continue
            if candidate.worker in job.avoid:
                avoided[candidate.worker] = candidate
                continue
            drawn[candidate.worker] = candidate
            num_more -= 1
            if not num_more:
                return

    take(_in_random_order(workers, rng), 2)
    take(warmest, 1)
    return list(drawn.values()) or list(avoided.values())[:2]


def plan(
    job: Job,
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    split_min_tokens: int,
    rng: random.Random,
) -> Plan | None:
    """The plan for `job` among those drawn; None when no worker can take it now."""
    if job.num_remaining <= 1 and (prefill or decode):
        return Whole(*choose(job, [*prefill, *decode], whole_cost, rng))
    if not decode:
        return None
    may_split = bool(prefill) and job.may_split
    reader, readers = choose(job, decode, decode_cost if may_split else whole_cost, rng)
    if not may_split or job.num_tokens - reader.num_cached_tokens <= split_min_tokens:
        return Whole(reader, readers)
    source, sources = choose(job, prefill, whole_cost, rng)
    return Split(source, reader, sources + readers)


def choose(
    job: Job,
    candidates: Sequence[Candidate],
    cost_of: Callable[[Job, Candidate], Cost],
    rng: random.Random,
) -> tuple[Candidate, tuple[Considered, ...]]:
    """The one to take, and the costs of all."""
    costs = [cost_of(job, candidate) for candidate in candidates]
    totals = [cost.total for cost in costs]
    limit = min(totals) + NEAR_TOKENS
    near = [c for c, total in zip(candidates, totals, strict=True) if total <= limit]
    chosen = min(near, key=lambda c: (c.num_running, rng.random()))
    return chosen, tuple(zip(candidates, costs, strict=True))


def whole_cost(job: Job, candidate: Candidate) -> Cost:
    return _cost(job, candidate, 1.0)


def decode_cost(job: Job, candidate: Candidate) -> Cost:
    """What is not cached is pulled instead of computed."""
    return _cost(job, candidate, PULL_COST)


def _cost(job: Job, candidate: Candidate, token_cost: float) -> Cost:
    excess = max(0.0, candidate.recent_share - FAIR_SHARE_SLACK)
    return Cost(
        token_cost * max(0, job.num_tokens - candidate.num_cached_tokens),
        candidate.num_waiting_tokens,
        (HERD_FACTOR - 1) * candidate.num_unreported_tokens,
        RUNNING_TOKENS * candidate.num_running,
        BALANCE * job.num_tokens * excess,
    )


def has_room(candidate: Candidate, job: Job) -> bool:
    """A job larger than the pool passes: the worker refuses it with the numbers in the error."""
    if candidate.is_prefill:
        return True
    num_pages = job.num_pages_on(candidate)
    return num_pages <= candidate.num_free_pages or num_pages > candidate.num_pages


def _in_random_order(workers: Sequence[W], rng: random.Random) -> Iterator[W]:
    """Shuffles all only for those who want more than the first few."""
    drawn = dict.fromkeys(int(rng.random() * len(workers)) for _ in workers[:FIRST_DRAWN])
    yield from (workers[i] for i in drawn)
    rest = [i for i in range(len(workers)) if i not in drawn]
    rng.shuffle(rest)
    yield from (workers[i] for i in rest)
