"""Where a request runs: pure functions from what the router knows to a plan.

Cost is counted in tokens of prefill, the currency of time to first token:

    waiting tokens ahead + uncached tokens            what the request itself waits for
    + streams x (STEP_TOKENS + STALL x uncached)      the slow-down that it meets and causes
    + sent since the last report x others             what other routers sent meanwhile
    + BALANCE x tokens x share above fair             so that one warm worker is not the only one
    + MISS_TOKENS x hopes that are missed             for its ttft_ms, and itl_ms of those beside it
    + what of the pull from there is not hidden       links.py

Tokens that see many others, and those of a worker that is slower than its peers, count for more.

All workers are looked at; what would be missed is asked of the MAX_WEIGHED cheapest, who alone come
into question then. With other routers beside it, each cost is made greater by lot, by up to what
they may be adding just now: those who saw the same report do not all choose the same worker.
docs/routing.md explains the terms.
"""

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.router.hopes import DOUBT_S

STALL = 0.1  # of a token's time that each stream beside it loses, in its request's own waiting
HOPING = 0.5  # of it for a stream whose hope is known: `misses` says the rest
STEP_TOKENS = 32  # that a stream costs whoever steps beside it
BALANCE = 1.5
CHANCE_SHARE = 0.08  # x sqrt(workers) above fair costs nothing: sessions stay where their KV is
NEAR_TOKENS = 48
PULL_COST = 0.125  # of a token pulled, in tokens computed
MISS_TOKENS = 60_000  # that a stream is worth, and what it hopes for
MAX_WEIGHED = 8
MAX_SHOWN = 4  # costs of a side that are kept for `paceline explain`


class Worker(Protocol):
    """What the router knows of a worker that may take a request now."""

    @property
    def worker_id(self) -> str: ...
    @property
    def is_prefill(self) -> bool: ...
    @property
    def num_waiting_tokens(self) -> int:
        """To compute before the request."""

    @property
    def unreported_tokens(self) -> int:
        """Of these, sent by this router since the worker's last frame."""

    @property
    def num_running(self) -> int:
        """Sequences there, those that wait included."""

    @property
    def num_free_pages(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def most_pages(self) -> tuple[int, ...]:
        """Of a sequence, by page group; 0: by its length alone."""

    @property
    def recent_requests(self) -> float: ...
    @property
    def waiting_cost(self) -> float:
        """Of what it has to compute before the request."""

    @property
    def token_cost(self) -> float:
        """Its time for a token over that of its peers for one of a usual prompt."""

    @property
    def pair_cost(self) -> float:
        """The same for a token and one that it sees."""

    @property
    def num_hoping(self) -> int:
        """Streams of this router that hope for a time between tokens."""

    def pull_costs(
        self, sources: Any, num_tokens: int, computed: Sequence[float]
    ) -> Sequence[float]:
        """To pull so much from each, while the prompt costs it what it has computed. None: all the
        same."""

    def misses(
        self, num_new: int, num_cached: int, now: float, due: float, doubt_s: float
    ) -> float:
        """How many hopes would be missed because of a prompt of `num_new` tokens, its own for a
        first token at `due`, give or take `doubt_s`, included."""


class Candidate(NamedTuple):
    """A worker as it was when a plan was made. `is_prefill`: and as what it came into question."""

    worker_id: str
    is_prefill: bool
    num_cached_tokens: int = 0  # of this request, by the index
    num_waiting_tokens: int = 0
    unreported_tokens: int = 0
    num_running: int = 0
    num_free_pages: int = 1 << 30
    num_pages: int = 1 << 30
    most_pages: tuple[int, ...] = (0,)
    recent_requests: float = 0.0
    token_cost: float = 1.0
    pair_cost: float = 0.0
    num_hoping: int = 0

    @property
    def waiting_cost(self) -> float:
        return self.token_cost * self.num_waiting_tokens

    def pull_costs(
        self, sources: Sequence["Candidate"], num_tokens: int, computed: Sequence[float]
    ) -> Sequence[float]:
        return ()

    def misses(
        self, num_new: int, num_cached: int, now: float, due: float, doubt_s: float
    ) -> float:
        return 0.0


def candidate_of(worker: Worker, num_cached_tokens: int, computes: bool = False) -> Candidate:
    """`computes`: for another, whatever else it does."""
    return Candidate(
        worker.worker_id,
        computes or worker.is_prefill,
        num_cached_tokens,
        worker.num_waiting_tokens,
        worker.unreported_tokens,
        worker.num_running,
        worker.num_free_pages,
        worker.num_pages,
        worker.most_pages,
        worker.recent_requests,
        worker.token_cost,
        worker.pair_cost,
        worker.num_hoping,
    )


@dataclass(frozen=True, slots=True)
class Job:
    """The part of a request that a plan depends on."""

    num_tokens: int  # prompt and forced tokens
    num_remaining: int  # output tokens that may still come; 0: an embedding
    num_choices: int = 1
    avoid: frozenset[str] = field(default_factory=frozenset)  # failed it before: last resort
    may_split: bool = True
    others: float = 0.0  # load of other routers on the same workers, over that of this one
    now: float = 0.0
    due: float = math.inf  # its first token is hoped for until then
    doubt_s: float = DOUBT_S  # give or take

    def num_pages(self, most_pages: tuple[int, ...]) -> int:
        """That it needs on a worker whose page groups hold so many a sequence."""
        num_blocks = -(-self.num_tokens // PAGE_TOKENS) + self.num_choices
        return sum(min(num_blocks, most or num_blocks) for most in most_pages)


class Cost(NamedTuple):
    """The terms of a candidate's cost, each in tokens of prefill."""

    uncached: float  # what the request itself computes or pulls
    waiting: float  # to compute before it
    unreported: float  # what other routers sent since the worker's last report
    running: float  # streams that step together with it, and that its prompt stalls
    balance: float  # above its fair share of recent requests
    misses: float = 0.0  # of hopes, its own and of streams beside it
    pull: float = 0.0  # what of the reader's pull from it is not hidden

    @property
    def total(self) -> float:
        return math.fsum(self)


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
W = TypeVar("W", bound=Worker)


def plan(
    job: Job,
    prefill: Sequence[W],
    decode: Sequence[W],
    cached: Mapping[W, int],
    split_min_tokens: int,
    rng: random.Random,
    spared: Mapping[W, int] | None = None,
) -> Plan | None:
    """The plan for `job` among those open to it; None when no worker can take it now.

    `cached`: tokens of the job that those hold which hold any; `spared`: and what pulls from others
    would spare them, where it is computed.
    """
    spared = cached if spared is None else spared
    prefill, decode = _trusted(job, prefill), _able(job, decode)
    if job.num_remaining <= 1 and (prefill or decode):
        either = list(dict.fromkeys((*prefill, *decode)))  # some are both
        return Whole(*choose(job, either, spared, 1.0, rng))
    if not decode:
        return None
    may_split = bool(prefill) and job.may_split
    if may_split:
        reader, readers = choose(job, decode, cached, PULL_COST, rng)
    else:
        reader, readers = choose(job, decode, spared, 1.0, rng)
    if not may_split or job.num_tokens - reader.num_cached_tokens <= split_min_tokens:
        return Whole(reader, readers)
    to = next(worker for worker in decode if worker.worker_id == reader.worker_id)
    source, sources = choose(job, prefill, spared, 1.0, rng, (to, reader.num_cached_tokens))
    if source.worker_id == reader.worker_id:  # it is both
        return Whole(source._replace(is_prefill=False), sources)
    return Split(source, reader, sources + readers)


def choose(
    job: Job,
    workers: Sequence[W],
    cached: Mapping[W, int],
    token_cost: float,
    rng: random.Random,
    pull_to: tuple[W, int] | None = None,
) -> tuple[Candidate, tuple[Considered, ...]]:
    """The one to take, and the least costs. Of near ones the least busy is taken, ties by lot.

    `token_cost`: of one that is not cached; less than 1 where it is pulled. `pull_to`: who will
    pull the KV from it, and how many tokens it has.
    """
    terms, totals = _terms(job, workers, cached, token_cost)
    if token_cost == 1.0 and (job.due < math.inf or any(worker.num_hoping for worker in workers)):
        terms, totals = _with_misses(job, workers, cached, terms, totals)
    if pull_to is not None:
        terms, totals = _with_pulls(job, workers, pull_to, terms, totals)
    if job.others:
        share = job.others / (1 + job.others)
        adding = [share * rng.random() * uncached for uncached, *_ in terms]
        totals = [total + more for total, more in zip(totals, adding, strict=True)]
    limit = min(totals) + NEAR_TOKENS
    near = [i for i, total in enumerate(totals) if total <= limit]
    chosen = near[0]
    if len(near) > 1:
        chosen = min(near, key=lambda i: (workers[i].num_running, rng.random()))
    totals[chosen] = float("-inf")  # shown first
    shown = sorted(range(len(workers)), key=totals.__getitem__)[:MAX_SHOWN]
    computes = pull_to is not None
    considered = tuple(
        (candidate_of(workers[i], cached.get(workers[i], 0), computes), Cost(*terms[i]))
        for i in shown
        if totals[i] < math.inf
    )
    return considered[0][0], considered


Terms = tuple[float, ...]  # of Cost


def _terms(
    job: Job, workers: Sequence[W], cached: Mapping[W, int], token_cost: float
) -> tuple[list[Terms], list[float]]:
    """Of each worker's Cost, and their sums. One pass, in plain tuples: this is what the time of a
    decision goes to."""
    found: list[Terms] = []
    totals: list[float] = []
    num_tokens, others, held = job.num_tokens, job.others, cached.get
    stall = STALL if token_cost == 1.0 else 0.0
    recent = [worker.recent_requests for worker in workers]
    mean = sum(recent) / len(recent)
    free = mean * (1 + CHANCE_SHARE * math.sqrt(len(recent)))
    excess_cost = BALANCE * num_tokens / mean if mean else 0.0
    for worker, requests in zip(workers, recent, strict=True):
        num_cached = held(worker, 0)
        num_new = num_tokens - num_cached
        uncached = num_new * (worker.token_cost + worker.pair_cost * (num_cached + 0.5 * num_new))
        stalled = 0.0 if worker.is_prefill else stall * uncached
        own = token_cost * uncached
        waiting = worker.waiting_cost
        unreported = others * worker.unreported_tokens
        num_running = worker.num_running
        running = num_running * STEP_TOKENS + (num_running - HOPING * worker.num_hoping) * stalled
        balance = excess_cost * (requests - free) if requests > free else 0.0
        found.append((own, waiting, unreported, running, balance))
        totals.append(own + waiting + unreported + running + balance)
    return found, totals


def _with_misses(
    job: Job,
    workers: Sequence[W],
    cached: Mapping[W, int],
    terms: list[Terms],
    totals: list[float],
) -> tuple[list[Terms], list[float]]:
    """Costs with what streams would miss, of the cheapest; the others are out of the question."""
    terms, weighed = list(terms), [math.inf] * len(totals)
    for i in heapq.nsmallest(MAX_WEIGHED, range(len(totals)), key=totals.__getitem__):
        num_cached = cached.get(workers[i], 0)
        num_new = job.num_tokens - num_cached
        misses = workers[i].misses(num_new, num_cached, job.now, job.due, job.doubt_s)
        terms[i] = (*terms[i], MISS_TOKENS * misses)
        weighed[i] = totals[i] + MISS_TOKENS * misses
    return terms, weighed


def _with_pulls(
    job: Job, sources: Sequence[W], pull_to: tuple[W, int], terms: list[Terms], totals: list[float]
) -> tuple[list[Terms], list[float]]:
    """Costs with what of a pull from each is not hidden."""
    reader, num_held = pull_to
    pulls = reader.pull_costs(sources, job.num_tokens - num_held, [term[0] for term in terms])
    if not pulls:
        return terms, totals
    pairs = zip(terms, pulls, strict=True)
    terms = [(*those[:5], *(those[5:] or (0.0,)), pull) for those, pull in pairs]
    return terms, [total + pull for total, pull in zip(totals, pulls, strict=True)]


def _able(job: Job, workers: Sequence[W]) -> Sequence[W]:
    """Of those that would decode it, who has room. Where a prompt is computed for others, what does
    not fit yet is queued."""
    needed = {most: job.num_pages(most) for most in {w.most_pages for w in workers}}
    workers = [
        worker
        for worker in workers
        if (pages := needed[worker.most_pages]) <= worker.num_free_pages
        or pages > worker.num_pages  # it refuses the job with the numbers in the error
    ]
    return _trusted(job, workers)


def _trusted(job: Job, workers: Sequence[W]) -> Sequence[W]:
    """Who failed it before counts only when there is nobody else."""
    if not job.avoid:
        return workers
    return [worker for worker in workers if worker.worker_id not in job.avoid] or workers


def has_room(candidate: Candidate, job: Job) -> bool:
    return candidate.is_prefill or bool(_able(job, [candidate]))
