"""Where a request runs: pure functions from what the router knows to a plan.

Cost is counted in tokens of prefill, the currency of time to first token:

    waiting tokens ahead + uncached tokens            what the request itself waits for
    + RUNNING_TOKENS x sequences running              the slow-down that it meets and causes
    + what this router sent since the last report x HERD_FACTOR   others saw the same report
    + BALANCE x tokens x share above fair             so that one warm worker is not the only one

Candidates are the one with the longest cached prefix and two drawn at random (power of two
choices); of those within NEAR_TOKENS of the cheapest, the least busy one is taken, ties by lot.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.kv_layout import PAGE_TOKENS

RUNNING_TOKENS = 32
HERD_FACTOR = 4
BALANCE = 1.5
FAIR_SHARE_SLACK = 1.15  # shares up to here cost nothing: sessions stay where their KV is
NEAR_TOKENS = 48
PULL_COST = 0.125  # of a token pulled, in tokens computed


@dataclass(frozen=True, slots=True)
class Candidate:
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
    num_remaining: int  # output tokens that may still come
    num_choices: int = 1
    avoid: frozenset[str] = field(default_factory=frozenset)  # failed it before: last resort
    may_split: bool = True

    def num_pages_on(self, candidate: Candidate) -> int:
        num_blocks = -(-self.num_tokens // PAGE_TOKENS) + self.num_choices
        return sum(min(num_blocks, most or num_blocks) for most in candidate.most_pages)


@dataclass(frozen=True, slots=True)
class Whole:
    """Prefill and decode on one worker."""

    worker: Candidate


@dataclass(frozen=True, slots=True)
class Split:
    """Prefill on one worker; the other pulls the KV and decodes."""

    prefill: Candidate
    decode: Candidate


Plan = Whole | Split


def plan(
    job: Job, candidates: Sequence[Candidate], split_min_tokens: int, rng: random.Random
) -> Plan | None:
    """The plan for `job`; None when no worker can take it now."""
    prefill = _willing(job, [c for c in candidates if c.is_prefill])
    decode = _willing(job, [c for c in candidates if not c.is_prefill and _has_room(c, job)])
    if job.num_remaining <= 1 and (prefill or decode):
        return Whole(choose(job, prefill + decode, whole_cost, rng))
    if not decode:
        return None
    reader = choose(job, decode, decode_cost if prefill and job.may_split else whole_cost, rng)
    uncached = job.num_tokens - reader.num_cached_tokens
    if not prefill or not job.may_split or uncached <= split_min_tokens:
        return Whole(reader)
    return Split(choose(job, prefill, whole_cost, rng), reader)


def choose(
    job: Job,
    candidates: Sequence[Candidate],
    cost: Callable[[Job, Candidate], float],
    rng: random.Random,
) -> Candidate:
    drawn = rng.sample(candidates, min(2, len(candidates)))
    most_cached = max(candidates, key=lambda c: (c.num_cached_tokens, rng.random()))
    if most_cached.num_cached_tokens:
        drawn.append(most_cached)
    costs = [cost(job, candidate) for candidate in drawn]
    limit = min(costs) + NEAR_TOKENS
    near = [c for c, cost in zip(drawn, costs, strict=True) if cost <= limit]
    return min(near, key=lambda c: (c.num_running, rng.random()))


def whole_cost(job: Job, candidate: Candidate) -> float:
    return _uncached(job, candidate) + _load_cost(job, candidate)


def decode_cost(job: Job, candidate: Candidate) -> float:
    return PULL_COST * _uncached(job, candidate) + _load_cost(job, candidate)


def _uncached(job: Job, candidate: Candidate) -> int:
    return max(0, job.num_tokens - candidate.num_cached_tokens)


def _load_cost(job: Job, candidate: Candidate) -> float:
    herd = (HERD_FACTOR - 1) * candidate.num_unreported_tokens
    excess = max(0.0, candidate.recent_share - FAIR_SHARE_SLACK)
    balance = BALANCE * job.num_tokens * excess
    running = RUNNING_TOKENS * candidate.num_running
    return candidate.num_waiting_tokens + herd + running + balance


def _has_room(candidate: Candidate, job: Job) -> bool:
    """A job larger than the pool passes: the worker refuses it with the numbers in the error."""
    num_pages = job.num_pages_on(candidate)
    return num_pages <= candidate.num_free_pages or num_pages > candidate.num_pages


def _willing(job: Job, candidates: list[Candidate]) -> list[Candidate]:
    return [c for c in candidates if c.worker not in job.avoid] or candidates
