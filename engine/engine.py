"""The engine of one rank: commands in, step by step events out. No network.

    plan → launch (forward) → promise → sample → retire (commit, emit, fork, end) → StepOutput

On a device the launches return at once, and the next step is planned and launched before the one
under way retires. It counts on what that one is sure to bring (engine/promise.py); tokens that it
draws are read on the device, and by the host one step later:

    device   … sample n ─ forward n+1 ──────────────────── sample n+1 ─ forward n+2 …
    host       launch n+1 ─ retire n ─ sample n+1 ─ output ─ launch n+2 ─ retire n+1 …

On the CPU a launch computes, and each step retires before the next one is planned.

Commands may come from another thread while a step computes: a reservation is answered at once,
not a step later. The lock is free during forward and sampling only. What a command ends or
preempts in between has another epoch when the step retires, and its result is dropped.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from paceline.engine.admission import Admission
from paceline.engine.allocator import Allocator, StepClock
from paceline.engine.allowances import Allowances
from paceline.engine.batch_state import BatchState
from paceline.engine.canary import Canary
from paceline.engine.commands import Commands
from paceline.engine.config import EngineConfig
from paceline.engine.cuda_graph import DecodeGraphs
from paceline.engine.groups import Groups
from paceline.engine.messages import Command, Load, StepOutput
from paceline.engine.outcome import Outcome
from paceline.engine.page_pool import PagePool
from paceline.engine.plan import Plan
from paceline.engine.pool_calls import PoolCalls
from paceline.engine.pools import PageSums
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.promise import promise
from paceline.engine.runner import Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.step_parts import Forwarded, Launched, Prepared
from paceline.engine.warm_up import Progress, warm_up
from paceline.models.base import Model

# A step that is expected to take longer is waited for: who comes meanwhile joins the next one, and
# what the host does in between, a millisecond, is little beside it.
MAX_AHEAD_S = 0.02

_log = structlog.get_logger("paceline.rank")


@dataclass(slots=True)
class LaunchedStep:
    """A step between launch and retirement. `launched` comes with its sampling."""

    step: int
    plan: Plan
    prepared: Prepared
    forwarded: Forwarded
    started_s: float
    launched: Launched | None = None


class Engine:
    """`pools`: a tensor a rank, which all page groups share; `memory`: its bytes, on the CPU;
    `canary`: what peers compare with theirs, where there are peers.

    With CUDA graphs the last page of the pool is scratch and is never given to a request.
    `handle`, `take_output` and `pool_calls` may be used from other threads; `step`, `advance`,
    `launch`, `sample` and `retire` belong to one. `on_decodes` is called after each step that only
    decoded, with its seconds and how many sequences it brought forward. While `gives_way` says so,
    no step is launched before the one ahead of it has ended.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        pools: tuple[torch.Tensor, ...],
        memory: memoryview | None = None,
        canary: Canary | None = None,
    ) -> None:
        groups, layout = model.layout.groups, model.layout
        use_graphs = pools[0].device.type == "cuda" and config.cuda_graphs
        num_pages = pools[0].shape[0] - (1 if use_graphs else 0)
        sums = PageSums(pools[0], memory, layout.page, len(layout.ranks))
        self.clock = StepClock()
        has_window = tuple(group.window > 0 for group in groups)
        self.pool = PagePool(num_pages, config.max_pinned_share, has_window)
        self.cache = PrefixCache(self.pool, groups, config.prefix_cache)
        self.pool_calls = PoolCalls(self.cache, sums, canary)
        allowances = Allowances(model.layout, num_pages, model.context_length, config)
        self.max_length = allowances.max_length
        self.state = BatchState(config.max_running, self.max_length, len(groups))
        allocator = Allocator(groups, self.cache, self.clock, self.state.set_pages)
        self.scheduler = Scheduler(config, self.state, allocator, allowances)
        graphs = None
        if use_graphs:
            limits = (num_pages, config.max_running, self.max_length)
            graphs = DecodeGraphs(model, pools, *limits)
        self.runner = Runner(model, pools, self.state, sums, graphs)
        self.groups = Groups(self.scheduler, allocator, self.runner)
        self._outcome = Outcome(self.groups)
        admission = Admission(model, allowances)
        self._commands = Commands(self.groups, admission, layout.num_sums)
        on_cpu = pools[0].device.type == "cpu"
        self._overlaps = not on_cpu if config.overlap is None else config.overlap
        self._planned: Plan | None = None
        self._under_way: LaunchedStep | None = None
        self._retired_s = 0.0
        self._is_awaited = False  # the next step, since then
        self.on_decodes: Callable[[float, int], None] = _nobody_listens
        self.gives_way: Callable[[], bool] = _never
        self._is_stepped = False  # since the last output
        self._lock = threading.Lock()

    def warm_up(self, progress: Progress = lambda done, total: None) -> None:
        """Before the first command: compiles kernels and captures graphs where there are any."""
        if self.runner.device.type != "cpu":
            page = self.pool.num_pages if self.runner.graphs is not None else 0
            max_chunk_tokens = self.scheduler.allowances.max_chunk_tokens
            warm_up(self.runner, page, max_chunk_tokens, self.max_length, progress)

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
        """Retires a step, if there is one to run and no event to say first."""
        if self._has_events():
            return
        if self._under_way is None:
            self._under_way = self.launch()
            if self._under_way is not None:
                self.sample(self._under_way)
        flight = self._under_way
        if flight is None:
            return
        following = None
        if self._may_launch_behind(flight):
            following = self.launch()
            if following is None and self._has_events():
                return
        self.retire(flight)
        self._under_way = following
        if following is not None:
            self.sample(following)

    def _may_launch_behind(self, flight: LaunchedStep) -> bool:
        num_tokens = flight.plan.num_chunk_tokens
        is_short = self.scheduler.step_time.of(num_tokens) <= MAX_AHEAD_S
        return self._overlaps and is_short and not self.gives_way()

    def take_output(self, always: bool = False) -> StepOutput | None:
        """What changed since the last output; None if nothing did, unless `always`."""
        with self._lock:
            is_progress = always or self._is_stepped
            if not (is_progress or self._has_events()):
                return None
            self._is_stepped = False
            return self._output(is_progress)

    def launch(self) -> LaunchedStep | None:
        """Plans a step and launches its forward pass. None if there is nothing to run, or something
        to say."""
        started_s = time.perf_counter()
        with self._lock:
            plan = self._next_plan()
            if plan is None:
                return None
            prepared = self.runner.prepare(plan)
            self.clock.launched += 1
        forwarded = self._forward(plan, prepared)
        if forwarded is None:
            return self.launch()
        return LaunchedStep(self.clock.launched, plan, prepared, forwarded, started_s)

    def _forward(self, plan: Plan, prepared: Prepared) -> Forwarded | None:
        """None if memory was wanting, and steps will be smaller from now on."""
        try:
            return self.runner.forward(prepared)
        except torch.OutOfMemoryError:
            with self._lock:
                if not self.scheduler.shrink(plan):
                    raise
                self.clock.launched -= 1
        self.runner.give_back_memory()
        limit = self.scheduler.max_batch_tokens
        _log.warning("a step wanted more memory than there is", max_batch_tokens=limit)
        return None

    def sample(self, flight: LaunchedStep) -> None:
        """Launches the rest of a step. The step before has retired."""
        with self._lock:
            promised = promise(flight.plan, self.state, self.pool)
        flight.launched = self.runner.sample(flight.prepared, flight.forwarded, promised)

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
        assert flight.launched is not None, "its sampling was not launched"
        result = flight.launched.collect()
        now_s = time.perf_counter()
        with self._lock:
            self._outcome.apply(flight.plan, result)
            self.clock.retired = flight.step
            self.pool.retire_step(flight.step)
            took_s = self._observe(flight, now_s)
            self._is_stepped = True
        if not flight.plan.chunks:
            self.on_decodes(took_s, len(flight.plan.decodes))

    def _observe(self, flight: LaunchedStep, now_s: float) -> float:
        """How long a step took that has ended now, once the one before had."""
        plan, step_time = flight.plan, self.scheduler.step_time
        took_s = now_s - max(flight.started_s, self._retired_s)
        interval_s = now_s - self._retired_s if self._is_awaited else took_s
        step_time.observe(plan.num_chunk_tokens, took_s)
        chunks = ((entry.num_new, entry.context) for entry in plan.chunks)
        step_time.observe_interval(len(plan.decodes), chunks, interval_s)
        self._retired_s = now_s
        self._is_awaited = len(self.state) > 0
        return took_s

    def has_work(self) -> bool:
        """Whether a call of `step` may do something."""
        is_busy = self._under_way is not None or self.scheduler.num_sequences
        return bool(is_busy or self._has_events())

    def awaits_kv(self) -> bool:
        """Whether requests here wait for what others compute or have."""
        with self._lock:
            return any(group.is_filling for group in self.groups.live.values())

    def load(self) -> Load:
        """Prompts that are being filled wait, as those do that have pages and no row."""
        scheduler, filling = self.scheduler, self.groups.filling
        chunks = sum(s.num_remaining for s in self.state.sequences if s.num_remaining > 1)
        queued = scheduler.waiting.num_tokens + scheduler.ready.num_tokens
        behind_offers = sum(group.num_behind_offer for group in filling)
        num_running = max(0, len(self.state) - scheduler.num_stuck)
        return Load(
            num_running=num_running,
            num_waiting=scheduler.num_sequences + len(filling) - num_running,
            num_waiting_tokens=queued + chunks + behind_offers,
            num_free_pages=max(0, self.pool.num_available - scheduler.waiting.num_pages),
            num_pages=self.pool.num_pages,
            num_preemptions=scheduler.num_preemptions,
            token_s=scheduler.step_time.token_s or scheduler.step_time.tested_token_s,
            num_deferred=len(filling),
        )

    def _has_events(self) -> bool:
        return bool(self.groups.events or self.cache.has_events)

    def _output(self, is_progress: bool) -> StepOutput:
        events, self.groups.events = self.groups.events, []
        events += self.cache.take_events()
        return StepOutput(self.clock.retired, events, self.load(), is_progress)


def _nobody_listens(seconds: float, num_sequences: int) -> None: ...


def _never() -> bool:
    return False
