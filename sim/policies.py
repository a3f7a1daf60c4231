"""What others route by, on what our router knows: rivals in the replay of traces.

Each looks at all workers that can take a request. Published weights: llm-d's prefix 3, queue 2,
KV 2; Dynamo's cost of one block to prefill and one block in use, temperature 0.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.router.config import RouterConfig
from paceline.router.fleet import Fleet
from paceline.router.placement import Line, Placer, PrefixLookup
from paceline.router.planner import Candidate, Job, Plan, Split, Whole, candidate_of, has_room
from paceline.router.worker_session import WorkerSession


class Seen(NamedTuple):
    """What a formula looks at of a worker."""

    worker: Candidate
    num_queued: int  # requests not in its batch, those it has not told of included


class Formula(Protocol):
    """Chooses one of the candidates, which are never none."""

    @property
    def name(self) -> str: ...

    def choose(self, job: Job, them: list[Seen], rng: random.Random) -> Candidate: ...


@dataclass
class RoundRobin:
    name: str = "round-robin"
    number: int = -1

    def choose(self, job: Job, them: list[Seen], rng: random.Random) -> Candidate:
        self.number += 1
        return them[self.number % len(them)].worker


@dataclass(frozen=True)
class LeastLoaded:
    name: str = "least-loaded"

    def choose(self, job: Job, them: list[Seen], rng: random.Random) -> Candidate:
        return min((seen.worker for seen in them), key=lambda c: (c.num_running, rng.random()))


@dataclass(frozen=True)
class Weighted:
    """llm-d: the highest sum of weighted scores between 0 and 1.

    Prefix: share of the prompt that is cached. Queue: 1 for the shortest, 0 for the longest.
    KV: share of the pool that is free.
    """

    prefix: float = 3.0
    queue: float = 2.0
    kv: float = 2.0

    @property
    def name(self) -> str:
        return f"llm-d {self.prefix:g}:{self.queue:g}:{self.kv:g}"

    def choose(self, job: Job, them: list[Seen], rng: random.Random) -> Candidate:
        lengths = [seen.num_queued for seen in them]
        shortest, longest = min(lengths), max(lengths)

        def score(seen: Seen) -> float:
            worker, spread = seen.worker, longest - shortest
            queue = (longest - seen.num_queued) / spread if spread else 1.0
            prefix = worker.num_cached_tokens / job.num_tokens
            kv = worker.num_free_pages / worker.num_pages
            return self.prefix * prefix + self.queue * queue + self.kv * kv

        return max(them, key=lambda seen: (score(seen), rng.random())).worker


@dataclass(frozen=True)
class DynamoCost:
    """overlap x blocks to prefill, this request's included, + blocks in use; the lowest, or by lot
    with a softmax of the negative costs, normalised to their range, at a temperature."""

    overlap: float = 1.0
    temperature: float = 0.0

    @property
    def name(self) -> str:
        return f"Dynamo {self.overlap:g} @ {self.temperature:g}"

    def choose(self, job: Job, them: list[Seen], rng: random.Random) -> Candidate:
        def cost(candidate: Candidate) -> float:
            uncached = job.num_tokens - candidate.num_cached_tokens
            prefill = (candidate.num_waiting_tokens + uncached) / PAGE_TOKENS
            in_use = candidate.num_pages - candidate.num_free_pages
            return self.overlap * prefill + in_use + job.num_tokens / PAGE_TOKENS

        workers = [seen.worker for seen in them]
        costs = [cost(worker) for worker in workers]
        if not self.temperature:
            return min(zip(costs, workers, strict=True), key=lambda p: (p[0], rng.random()))[1]
        lowest, spread = min(costs), (max(costs) - min(costs)) or 1.0
        weights = [math.exp(-(c - lowest) / spread / self.temperature) for c in costs]
        return rng.choices(workers, weights)[0]


class FormulaPlacer(Placer):
    """The router's own placement, but for who decides: a formula, over all workers."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        lookup: PrefixLookup,
        rng: random.Random,
        formula: Formula,
    ) -> None:
        super().__init__(config, fleet, lookup, rng)
        self._formulas = formula, replace(formula)  # type: ignore[type-var]

    def _plan(self, line: Line, job: Job, now: float) -> Plan | None:
        revision = self._fleet.revision(line.digest)
        if revision is None:
            return None
        cached = self._cached_tokens(line, job.num_tokens, now)

        def among(sessions: list[WorkerSession]) -> list[Seen]:
            num_at_most = line.request.num_tokens_at_most
            able = self._fleet.open_now(sessions, now, num_at_most)
            them = (Seen(candidate_of(s, cached.get(s, 0)), num_queued(s)) for s in able)
            return [seen for seen in them if has_room(seen.worker, job)]

        decode, prefill = among(revision.decode), among(revision.prefill)
        if not decode or (revision.prefill and not prefill):
            return None
        reader = self._formulas[0].choose(job, decode, self._rng)
        lacking = job.num_tokens - reader.num_cached_tokens
        if not prefill or lacking <= self._config.split_min_tokens or job.num_remaining <= 1:
            return Whole(reader)
        return Split(self._formulas[1].choose(job, prefill, self._rng), reader)


def num_queued(session: WorkerSession) -> int:
    load = session.load
    return max(load.num_waiting, session.num_in_flight - load.num_running)


PlacerOf = Callable[[RouterConfig, Fleet, PrefixLookup, random.Random], Placer]


def by_formula(formula: Formula) -> PlacerOf:
    def make(
        config: RouterConfig, fleet: Fleet, lookup: PrefixLookup, rng: random.Random
    ) -> Placer:
        return FormulaPlacer(config, fleet, lookup, rng, replace(formula))  # type: ignore[type-var]

    return make
