"""A worker whose steps take the time that a profile says, and nothing else.

First come, first served: each step takes prompt tokens of the oldest requests, beside one token of
each sequence that decodes. Steps without prompts are alike and pass in runs of up to MAX_RUN_STEPS,
cut short when a request comes.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.sim.cache import BlockCache
from paceline.sim.clock import Agenda
from paceline.sim.profile import Profile
from paceline.sim.trace import BLOCK_TOKENS, Arrival
from paceline.v1 import worker_pb2

MAX_RUN_STEPS = 16
Report = Callable[[], None]


@dataclass(slots=True, eq=False)
class Work:
    """A request at one worker. `num_cached` is known when its prompt begins."""

    arrival: Arrival
    on_first_token: Report
    on_end: Report
    decodes: bool = True  # False: the prompt alone, KV is held until `release`
    num_cached: int = 0
    num_done: int = 0  # prompt tokens computed or cached
    held: tuple[int, ...] = ()  # blocks that it uses
    is_admitted: bool = False

    @property
    def num_left(self) -> int:
        return self.arrival.num_prompt_tokens - self.num_done

    @property
    def num_private_pages(self) -> int:
        """Of what no other request can share: the prompt's end, and the output."""
        last = self.arrival.num_prompt_tokens - BLOCK_TOKENS * self.arrival.num_whole_blocks
        output = self.arrival.num_output_tokens if self.decodes else 0
        return -(-(last + output) // PAGE_TOKENS)

    @property
    def num_pages(self) -> int:
        whole = BLOCK_TOKENS * self.arrival.num_whole_blocks // PAGE_TOKENS
        return whole + self.num_private_pages


@dataclass(slots=True, eq=False)
class Step:
    began_at: float
    one_s: float
    num_steps: int
    chunks: list[tuple[Work, int]]
    is_cut: bool = False

    @property
    def end_at(self) -> float:
        return self.began_at + self.one_s * self.num_steps


@dataclass(slots=True)
class StepTimes:
    """Of tokens after the first: how long each took, as (seconds, tokens)."""

    gaps: list[tuple[float, int]] = field(default_factory=list)


class MockWorker:
    """`on_step` is called whenever a step has ended, after what it brought."""

    def __init__(
        self, profile: Profile, agenda: Agenda, chance: random.Random, noise: float
    ) -> None:
        self.profile = profile
        self.cache = BlockCache(profile.num_pages)
        self.on_step: Report = _nothing
        self.times = StepTimes()
        self._agenda = agenda
        self._chance = chance
        self._noise = noise
        self._queue: deque[Work] = deque()
        self._batch: list[tuple[int, int, Work]] = []  # by the step in which each ends
        self._kv_tokens = 0  # of the batch
        self._num_waiting_tokens = 0
        self._num_steps = 0
        self._step: Step | None = None
        self._order = itertools.count()

    def submit(self, work: Work) -> None:
        """Prompt first."""
        work.num_cached = self._num_cached(work)
        self._num_waiting_tokens += work.arrival.num_prompt_tokens - work.num_cached
        self._queue.append(work)
        self._cut()
        self._begin()

    def join(self, work: Work) -> None:
        """Its prompt was computed elsewhere, its KV is here, and its first token is out."""
        self.cache.store(self._blocks(work), work.held)
        work.held = self._blocks(work)
        self._cut()
        self._decode(work)
        self._begin()

    def reserve(self, work: Work) -> int:
        """Holds what is cached here, and pages for the rest. Returns the tokens to be pulled."""
        work.num_cached = self._num_cached(work)
        self._hold(work)
        return work.arrival.num_prompt_tokens - work.num_cached

    def release(self, work: Work) -> None:
        self.cache.release(work.held, work.num_private_pages)

    def load(self) -> worker_pb2.Load:
        wanted = sum(work.num_pages for work in self._queue if not work.is_admitted)
        return worker_pb2.Load(
            num_running=len(self._batch),
            num_waiting=len(self._queue),
            num_waiting_tokens=self._num_waiting_tokens,
            num_free_pages=max(0, self.cache.num_free_pages - wanted),
            num_pages=self.profile.num_pages,
            step=self._num_steps,
            rounds=self._num_steps,
        )

    def _begin(self) -> None:
        if self._step is not None:
            return
        chunks = self._take_chunks()
        batch = len(self._batch)
        noise = self._chance.uniform(1 - self._noise, 1 + self._noise)
        if chunks:
            num_tokens = sum(count for _, count in chunks)
            pairs = sum(count * (work.num_done + count / 2) for work, count in chunks)
            context = pairs / num_tokens
            one_s = self.profile.step_s(num_tokens, context, batch, self._kv_tokens) * noise
            step = Step(self._agenda.now, one_s, 1, chunks)
        elif batch:
            num_steps = min(self._batch[0][0] - self._num_steps, MAX_RUN_STEPS)
            kv_tokens = self._kv_tokens + batch * (num_steps - 1) / 2
            one_s = self.profile.decode_step_s(batch, kv_tokens) * noise
            step = Step(self._agenda.now, one_s, num_steps, [])
        else:
            return
        self._schedule(step)

    def _schedule(self, step: Step) -> None:
        self._step = step
        self._agenda.at(step.end_at, lambda: self._end(step))

    def _cut(self) -> None:
        """The run of steps that is under way ends with the step that is."""
        step = self._step
        if step is None or step.num_steps == 1:
            return
        num_steps = max(1, math.ceil((self._agenda.now - step.began_at) / step.one_s))
        if num_steps < step.num_steps:
            step.is_cut = True
            self._schedule(Step(step.began_at, step.one_s, num_steps, []))

    def _end(self, step: Step) -> None:
        if step.is_cut:
            return
        self._step = None
        self._num_steps += step.num_steps
        if self._batch:
            self.times.gaps.append((step.one_s, step.num_steps * len(self._batch)))
            self._kv_tokens += step.num_steps * len(self._batch)
        while self._batch and self._batch[0][0] <= self._num_steps:
            self._leave(heapq.heappop(self._batch)[2])
        for work, count in step.chunks:
            work.num_done += count
            self._num_waiting_tokens -= count
            if not work.num_left:
                self._queue.remove(work)
                self._prompt_done(work)
        self._begin()
        self.on_step()

    def _prompt_done(self, work: Work) -> None:
        self.cache.store(self._blocks(work), work.held)
        work.held = self._blocks(work)
        work.on_first_token()
        if work.decodes:
            self._decode(work)

    def _decode(self, work: Work) -> None:
        num_more = work.arrival.num_output_tokens - 1
        if not num_more:
            self.release(work)
            work.on_end()
            return
        heapq.heappush(self._batch, (self._num_steps + num_more, next(self._order), work))
        self._kv_tokens += work.arrival.num_prompt_tokens + 1

    def _leave(self, work: Work) -> None:
        arrival = work.arrival
        self._kv_tokens -= arrival.num_prompt_tokens + arrival.num_output_tokens
        self.release(work)
        work.on_end()

    def _take_chunks(self) -> list[tuple[Work, int]]:
        room = self.profile.max_step_tokens
        chunks = []
        for work in self._queue:
            if not room or not self._admit(work):
                break
            count = min(room, work.num_left)
            chunks.append((work, count))
            room -= count
        return chunks

    def _admit(self, work: Work) -> bool:
        """When its turn comes, and if the batch and the pool have room for all of it."""
        if work.is_admitted:
            return True
        if len(self._batch) >= self.profile.max_running:
            return False
        if work.num_pages > self.cache.num_free_pages and (self._batch or self._queue[0] != work):
            return False
        expected = work.num_cached
        work.num_done = work.num_cached = self._num_cached(work)
        self._num_waiting_tokens += expected - work.num_cached
        self._hold(work)
        return True

    def _hold(self, work: Work) -> None:
        work.held = self._blocks(work)[: work.num_cached // BLOCK_TOKENS]
        self.cache.hold(work.held, work.num_private_pages)
        work.is_admitted = True

    def _num_cached(self, work: Work) -> int:
        """At most all but one token, which is computed."""
        found = self.cache.num_cached_tokens(self._blocks(work))
        if found >= work.arrival.num_prompt_tokens:
            found -= BLOCK_TOKENS
        return found

    def _blocks(self, work: Work) -> tuple[int, ...]:
        return work.arrival.blocks[: work.arrival.num_whole_blocks]


def _nothing() -> None:
    return None
