"""The engine of one rank: commands in, step by step events out. No network.

    plan → launch (forward, sampling) → retire (commit, emit, fork, end) → StepOutput

Commands may come from another thread while a step computes: a reservation is answered at once,
not a step later. The lock is free during forward and sampling only. What a command ends or
preempts in between has another epoch when the step retires, and its result is dropped.
"""

import threading
import time
from dataclasses import dataclass

import torch

from paceline.engine.admission import Admission
from paceline.engine.allocator import Allocator, StepClock
from paceline.engine.allowances import Allowances
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
class LaunchedStep:
    """A step between launch and retirement."""

    step: int
    plan: Plan
    launched: Launched
    started_s: float


class Engine:
    """`pools`: one tensor, which all page groups share; `memory`: its bytes, if it is on the CPU.

    With CUDA graphs the last page of the pool is scratch and is never given to a request.
    `handle`, `take_output` and `pool_calls` may be used from other threads; `step`, `advance`,
    `launch` and `retire` belong to one.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        pools: tuple[torch.Tensor, ...],
        memory: memoryview | None = None,
    ) -> None:
        groups, page = model.layout.groups, model.layout.page
        use_graphs = pools[0].device.type == "cuda" and config.cuda_graphs
        num_pages = pools[0].shape[0] - (1 if use_graphs else 0)
        sums = page_sums(pools[0], memory, page)
        self.clock = StepClock()
        has_window = tuple(group.window > 0 for group in groups)
        self.pool = PagePool(num_pages, config.max_pinned_share, has_window)
        self.cache = PrefixCache(self.pool, groups, config.prefix_cache)
        self.pool_calls = PoolCalls(self.cache, sums)
        allowances = Allowances(model.layout, num_pages, model.context_length, config)
        self.max_length = allowances.max_length
        self.state = BatchState(config.max_running, self.max_length, len(groups))
        allocator = Allocator(groups, self.cache, self.clock, self.state.set_pages)
        self.scheduler = Scheduler(config, self.state, allocator, allowances)
        graphs = None
        if use_graphs:
            limits = (num_pages, config.max_running, self.max_length)
            graphs = DecodeGraphs(model, pools, *limits)
        self.runner = Runner(model, pools, self.state, graphs)
        self.groups = Groups(self.scheduler, allocator, self.runner)
        self._outcome = Outcome(self.groups, sums)
        admission = Admission(model, allowances)
        self._commands = Commands(self.groups, admission, page.num_heads)
        self._planned: Plan | None = None
        self._is_stepped = False  # since the last output
        self._lock = threading.Lock()

    def handle(self, command: Command) -> None:
        """Takes effect at once; its events come with the next output."""
        with self._lock:
            self._commands.handle(command)

    def step(self) -> StepOutput | None:
        """Runs one step. Events that are known already are returned first, without waiting for
        a forward pass. None: nothing to do until the next command, or until readers unpin."""
        self.advance()
        return self.take_output()

    def advance(self) -> None:
        """A step, if there is one to run and no event to say first."""
        if self._has_events():
            return
        flight = self.launch()
        if flight is not None:
            self.retire(flight)

    def take_output(self, always: bool = False) -> StepOutput | None:
        """What changed since the last output; None if nothing did, unless `always`."""
        with self._lock:
            is_progress = always or self._is_stepped
            if not (is_progress or self._has_events()):
                return None
            self._is_stepped = False
            return self._output(is_progress)

    def launch(self) -> LaunchedStep | None:
        """Plans a step and runs it. None if there is nothing to run, or something to say."""
        started_s = time.perf_counter()
        with self._lock:
            plan = self._next_plan()
            if plan is None:
                return None
            prepared = self.runner.prepare(plan)
            self.clock.launched += 1
        return LaunchedStep(self.clock.launched, plan, self.runner.run(prepared), started_s)

    def _next_plan(self) -> Plan | None:
        plan = self._planned or self.scheduler.plan()
        self._planned = None
        if plan is None:
            return None
        for sequence in self.scheduler.newly_admitted:
            self.groups.announce(sequence.group, sequence.num_committed)
        self.scheduler.newly_admitted = []
        if self.groups.events:
            self._planned = plan
            return None
        plan = plan.current()
        return plan if plan.scheduled else None

    def retire(self, flight: LaunchedStep) -> None:
        """Waits for a launched step and applies its result."""
        sampled, scored = flight.launched.collect()
        with self._lock:
            self._outcome.apply(flight.plan, sampled, scored)
            self.clock.retired = flight.step
            self.pool.retire_step(flight.step)
            num_tokens = flight.plan.num_chunk_tokens
            self.scheduler.step_time.observe(num_tokens, time.perf_counter() - flight.started_s)
            self._is_stepped = True

    def has_work(self) -> bool:
        """Whether a call of `step` may do something."""
        return bool(self._has_events() or self.scheduler.num_sequences)

    def load(self) -> Load:
        scheduler = self.scheduler
        chunks = sum(s.num_remaining for s in self.state.sequences if s.num_remaining > 1)
        num_running = max(0, len(self.state) - scheduler.num_stuck)
        return Load(
            num_running=num_running,
            num_waiting=scheduler.num_sequences - num_running,
            num_waiting_tokens=scheduler.waiting.num_tokens + chunks,
            num_free_pages=max(0, self.pool.num_available - scheduler.waiting.num_pages),
            num_pages=self.pool.num_pages,
            num_preemptions=scheduler.num_preemptions,
        )

    def _has_events(self) -> bool:
        return bool(self.groups.events or self.cache.has_events)

    def _output(self, is_progress: bool) -> StepOutput:
        events, self.groups.events = self.groups.events, []
        events += self.cache.take_events()
        return StepOutput(self.clock.retired, events, self.load(), is_progress)
