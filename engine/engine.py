"""The engine of one rank: commands in, step by step events out. No network, one thread.

    plan → launch (forward, sampling) → retire (commit, emit, fork, end) → StepOutput

A step is launched and retired apart, so that commands may come in between; what they end or
preempt has another epoch when the step retires, and its result is dropped.
"""

import time
from dataclasses import dataclass

import torch

from paceline.engine.admission import Admission
from paceline.engine.allocator import Allocator, StepClock
from paceline.engine.batch_state import BatchState
from paceline.engine.commands import Commands
from paceline.engine.config import EngineConfig
from paceline.engine.cuda_graph import DecodeGraphs
from paceline.engine.groups import Groups
from paceline.engine.messages import Command, Load, StepOutput
from paceline.engine.outcome import Outcome
from paceline.engine.page_pool import PagePool
from paceline.engine.plan import Plan
from paceline.engine.pool_calls import PoolCalls
from paceline.engine.pools import page_sums
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.runner import Launched, Runner
from paceline.engine.scheduler import Scheduler
from paceline.models.base import Model


@dataclass(frozen=True, slots=True)
class Flight:
    """A step between launch and retirement."""

    step: int
    plan: Plan
    launched: Launched
    started_s: float


class Engine:
    """`pools`: one tensor a page group; `memory`: the bytes of the first, if it is on the CPU.

    With CUDA graphs the last page of the pool is scratch and is never given to a request.
    `pool_calls` may be used from another thread; everything else belongs to the step thread.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        pools: tuple[torch.Tensor, ...],
        memory: memoryview | None = None,
    ) -> None:
        group = model.layout.groups[0]
        use_graphs = pools[0].device.type == "cuda" and config.cuda_graphs
        num_pages = pools[0].shape[0] - (1 if use_graphs else 0)
        sums = page_sums(pools[0], memory, group)
        self.clock = StepClock()
        self.pool = PagePool(num_pages, config.max_pinned_share)
        self.cache = PrefixCache(self.pool, config.prefix_cache)
        self.pool_calls = PoolCalls(self.cache, sums)
        admission = Admission(model, num_pages, config.output_window_tokens)
        self.max_length = admission.max_length
        self.state = BatchState(config.max_running, admission.max_length)
        allocator = Allocator(self.pool, self.cache, self.clock, self.state.set_page)
        self.scheduler = Scheduler(config, self.state, allocator, admission)
        graphs = None
        if use_graphs:
            limits = (num_pages, config.max_running, admission.max_length)
            graphs = DecodeGraphs(model, pools, *limits)
        self.runner = Runner(model, pools, self.state, graphs)
        self.groups = Groups(self.scheduler, allocator, self.runner)
        self._outcome = Outcome(self.groups, sums)
        self._commands = Commands(self.groups, admission, group.num_heads)
        self._planned: Plan | None = None
        self._num_outputs = 0

    def handle(self, command: Command) -> None:
        """Takes effect at once; its events come with the next step."""
        self._commands.handle(command)

    def step(self) -> StepOutput | None:
        """Runs one step. Events that are known already are returned first, without waiting for
        a forward pass. None: nothing to do until the next command, or until readers unpin."""
        flight = None
        if not self._has_events():
            flight = self.launch()
            if flight is not None:
                self.retire(flight)
        return self._output() if flight is not None or self._has_events() else None

    def launch(self) -> Flight | None:
        """Plans a step and sends it off. None if there is nothing to run, or something to say."""
        plan = self._planned or self.scheduler.plan()
        self._planned = None
        if plan is None:
            return None
        for sequence in self.scheduler.newly_admitted:
            self._outcome.announce(sequence.group, sequence.num_committed)
        self.scheduler.newly_admitted = []
        if self.groups.events:
            self._planned = plan
            return None
        plan = plan.current()
        if not plan.scheduled:
            return None
        self.clock.launched += 1
        started_s = time.perf_counter()
        return Flight(self.clock.launched, plan, self.runner.launch(plan), started_s)

    def retire(self, flight: Flight) -> None:
        """Waits for a launched step and applies its result."""
        sampled = flight.launched.collect()
        self._outcome.apply(flight.plan, sampled)
        self.clock.retired = flight.step
        self.pool.retire_step(flight.step)
        num_tokens = flight.plan.num_chunk_tokens
        self.scheduler.step_time.observe(num_tokens, time.perf_counter() - flight.started_s)

    def has_work(self) -> bool:
        """Whether a call of `step` may do something."""
        queued = len(self.scheduler.waiting) + len(self.scheduler.ready)
        return bool(self._has_events() or len(self.state) or queued)

    def load(self) -> Load:
        scheduler = self.scheduler
        chunks = sum(s.num_remaining for s in self.state.sequences if s.num_remaining > 1)
        return Load(
            num_running=len(self.state),
            num_waiting=len(scheduler.waiting) + len(scheduler.ready),
            num_waiting_tokens=scheduler.waiting.num_tokens + chunks,
            num_free_pages=max(0, self.pool.num_available - scheduler.waiting.num_pages),
            num_pages=self.pool.num_pages,
            num_preemptions=scheduler.num_preemptions,
        )

    def _has_events(self) -> bool:
        return bool(self.groups.events or self.cache.has_events)

    def _output(self) -> StepOutput:
        self._num_outputs += 1
        events, self.groups.events = self.groups.events, []
        events += self.cache.take_events()
        return StepOutput(self._num_outputs, events, self.load())
