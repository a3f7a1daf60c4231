"""Workers in virtual time, planned for by the real planner, accounting and index."""

import heapq
import itertools
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from paceline.core.keys import KEY_BYTES, chain_keys
from paceline.router.index import PrefixIndex
from paceline.router.planner import Candidate, Job, Plan, Whole, candidate_of, plan
from paceline.router.worker_session import WorkerSession
from paceline.v1 import worker_pb2

PREFILL_TOKENS_S = 10_000.0
TOKEN_S = 0.02
OUTPUT_TOKENS = 100

Policy = Callable[[Job, list[Candidate]], Candidate]


def plan_among(job: Job, candidates: list[Candidate], rng: random.Random) -> Plan | None:
    """As the router does it, when these are all workers."""
    prefill = [candidate for candidate in candidates if candidate.is_prefill]
    decode = [candidate for candidate in candidates if not candidate.is_prefill]
    cached = {candidate: candidate.num_cached_tokens for candidate in candidates}
    return plan(job, prefill, decode, cached, 32, rng)


@dataclass
class SimulatedWorker:
    session: WorkerSession
    view: int
    free_at: float = 0.0  # when its queue of prefills is empty
    num_running: int = 0
    num_served: int = 0


@dataclass
class Simulation:
    """Requests on decode workers: `start` begins one, `advance` lets the next thing happen."""

    num_workers: int
    policy: Policy | None = None
    seed: int = 0
    others: float = 0.0  # load of other routers, over that of this one
    now: float = 0.0
    ttfts: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.index = PrefixIndex(64 << 20)
        self.workers = {}
        for number in range(self.num_workers):
            info = worker_pb2.WorkerInfo(worker_id=f"d{number}", role=worker_pb2.ROLE_DECODE)
            info.num_pages = 1 << 20
            session = WorkerSession(info, 0.0)
            self.workers[info.worker_id] = SimulatedWorker(session, self.index.open())
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def start(self, tokens: list[int], output_tokens: int = OUTPUT_TOKENS) -> str:
        """Plans and sends a request; returns the worker's name."""
        keys = b"".join(chain_keys(bytes(32), tokens))
        found = self.index.match(keys, KEY_BYTES)
        candidates = [
            candidate_of(w.session, min(16 * found.get(w.view, 0), len(tokens) - 1))
            for w in self.workers.values()
        ]
        chosen = self._choose(Job(len(tokens), output_tokens, others=self.others), candidates)
        self._run(self.workers[chosen.worker_id], chosen, len(tokens), keys, output_tokens)
        return chosen.worker_id

    def advance(self) -> bool:
        """Runs the next event; False when nothing is left."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True

    def _choose(self, job: Job, candidates: list[Candidate]) -> Candidate:
        if self.policy is not None:
            return self.policy(job, candidates)
        found = plan_among(job, candidates, self.rng)
        assert isinstance(found, Whole)
        return found.worker

    def _run(
        self,
        worker: SimulatedWorker,
        chosen: Candidate,
        num_tokens: int,
        keys: bytes,
        output_tokens: int,
    ) -> None:
        uncached = num_tokens - chosen.num_cached_tokens
        stack = ExitStack()
        flight = stack.enter_context(worker.session.fly(None, uncached))  # type: ignore[arg-type]
        flight.send(worker_pb2.WorkerCommand())
        worker.session.outbox.get_nowait()
        worker.num_running += 1
        worker.num_served += 1
        worker.free_at = max(worker.free_at, self.now) + uncached / PREFILL_TOKENS_S
        self.ttfts.append(worker.free_at - self.now)

        def first_token() -> None:
            flight.prompt_done()
            short = b"".join(keys[i : i + 16] for i in range(0, len(keys), KEY_BYTES))
            self.index.store(worker.view, short)
            self._report(worker)

        def end() -> None:
            flight.ended = True
            stack.close()
            worker.num_running -= 1
            self._report(worker)

        self._at(worker.free_at, first_token)
        self._at(worker.free_at + output_tokens * TOKEN_S, end)

    def _report(self, worker: SimulatedWorker) -> None:
        waiting = max(0.0, worker.free_at - self.now) * PREFILL_TOKENS_S
        load = worker_pb2.Load(
            num_running=worker.num_running,
            num_waiting_tokens=round(waiting),
            num_free_pages=1 << 20,
            num_pages=1 << 20,
        )
        worker.session.handle(worker_pb2.WorkerFrame(load=load), self.now)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))
