"""Brings num_computed of every sequence towards num_tokens, a step at a time.

decodes first       one token each; a sequence without room for it takes a page, if need be
                    from the sequence that is last by priority and arrival (preemption)
chunks              running prompts, then waiting ones that fit whole, under the rest of the
                    token budget and the time budget
rows                by priority and arrival, whether KV was pulled or has to be computed
a preempted one     loses pages and row, and computes again, from the prefix cache if it can

A sequence whose promised page is pinned by a reader for the moment waits for another step. One
whose KV comes from a tier first leaves the queue with its pages; it comes back as ready.

A step may be planned while another runs, from what that one is sure to bring (engine/promise.py).
Pages that are let go then cannot be written before it has ended, so preemption waits for that.
"""

from collections.abc import Callable

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.allocator import Allocator, Grant, Room
from paceline.engine.allowances import Allowances, Pages
from paceline.engine.batch_state import BatchState
from paceline.engine.config import EngineConfig
from paceline.engine.messages import GrantedRun
from paceline.engine.plan import Plan, Scheduled, schedule
from paceline.engine.sequence import Sequence, Stage, pages_of
from paceline.engine.step_time import StepBudget, StepTime
from paceline.engine.waiting import WaitingQueue

_MAX_SCORED = 128  # rows of logits a step for prompt_logprobs: 25 MB of a 49k vocabulary


class Scheduler:
    """Owns the queues; rows belong to `state`, pages to `allocator`."""

    def __init__(
        self, config: EngineConfig, state: BatchState, allocator: Allocator, allowances: Allowances
    ) -> None:
        self.config = config
        self.max_batch_tokens = config.max_batch_tokens  # or less, once memory was wanting
        self.state = state
        self.allocator = allocator
        self.allowances = allowances
        self.waiting = WaitingQueue()  # for pages
        self.ready = WaitingQueue()  # have pages, wait for a row
        self.step_time = StepTime(config.step_time_ms / 1000, config.itl_target_ms / 1000)
        self.num_preemptions = 0
        self.num_stuck = 0  # in the batch, without the page that its next token needs
        self._must_preempt = False  # when the step under way has ended
        self.newly_admitted: list[Sequence] = []
        self.on_fill: Callable[[Sequence, list[GrantedRun]], None] = _no_fill
        self._renewal_pages = pages_of(config.output_window_tokens)
        self._has_hopes = False  # some request named a time between tokens
        self._num_unscored = 0  # rows of logits that this step may still score

    @property
    def num_sequences(self) -> int:
        """In batch and queues."""
        return len(self.state) + len(self.waiting) + len(self.ready)

    def plan(self) -> Plan | None:
        """The next step; None if no sequence can be brought forward now, or not well before the
        step under way has ended."""
        self.newly_admitted = []
        self.num_stuck = 0
        self._must_preempt = False
        self._num_unscored = _MAX_SCORED
        self._fill_rows()
        decodes = self._decodes()
        if self._must_preempt:
            return None
        num_tokens = self.max_batch_tokens - len(decodes)
        budget = self.step_time.budget(num_tokens, len(decodes), self._hoped_s(decodes))
        chunks = self._running_chunks(budget)
        self._admit(budget, decodes, chunks)
        return Plan(decodes, chunks) if decodes or chunks else None

    def shrink(self, plan: Plan) -> bool:
        """Halves the prompt tokens of steps to come, once memory was wanting for those of `plan`.
        False if streams would leave prompts nothing."""
        num_tokens = len(plan.decodes) + plan.num_chunk_tokens // 2
        if not plan.chunks or num_tokens <= self.config.max_running:
            return False
        self.max_batch_tokens = min(self.max_batch_tokens, num_tokens)
        return True

    def enqueue(self, sequence: Sequence) -> None:
        self._has_hopes |= sequence.group.spec.itl_ms > 0
        if sequence.is_granted:
            self.ready.push(sequence)
        else:
            self.waiting.push(sequence, sum(self._allowance(sequence)))

    def preempt(self, sequence: Sequence) -> None:
        """Takes pages and row; what is in flight for it no longer counts."""
        assert not sequence.is_promised, "its tokens would end with one that nobody knows"
        self.drop(sequence)
        self.allocator.release(sequence)
        self.num_preemptions += 1
        self.enqueue(sequence)

    def drop(self, sequence: Sequence, stage: Stage = Stage.ENDED) -> None:
        """Out of batch and queues. Its pages stay as they are."""
        sequence.epoch += 1
        if sequence.row >= 0:
            self.state.remove(sequence, stage)
        self.waiting.discard(sequence)
        self.ready.discard(sequence)
        sequence.stage = stage

    def _fill_rows(self) -> None:
        """By priority and arrival: those that have pages, and one prompt at a time before them, to
        which else nothing would be left for as long as others come with their pages."""
        while not self.state.is_full and (sequence := self.ready.first()) is not None:
            if self.waiting.is_before(sequence) and not self._has_prompt() and self._take_in():
                continue
            self.ready.discard(sequence)
            self.state.add(sequence)

    def _has_prompt(self) -> bool:
        return any(s.num_tokens - s.num_computed > 1 for s in self.state.sequences)

    def _decodes(self) -> list[Scheduled]:
        growing = [
            s
            for s in self.state.sequences
            if s.num_computed == PAGE_TOKENS * s.num_blocks and s.num_tokens - s.num_computed == 1
        ]
        stuck = set()
        for sequence in sorted(growing, key=lambda s: s.order):
            # One without a row was preempted for another.
            if sequence.row >= 0 and not self._make_room(sequence):
                stuck.add(sequence)
        self.num_stuck += sum(sequence.row >= 0 for sequence in stuck)
        return [
            schedule(sequence, 1)
            for sequence in self.state.sequences
            if sequence.num_tokens - sequence.num_computed == 1 and sequence not in stuck
        ]

    def _make_room(self, sequence: Sequence) -> bool:
        """Pages for its next token. May preempt others, or itself if it comes last."""
        left = sequence.group.max_length - sequence.num_tokens
        renewal = min(self._renewal_pages, pages_of(left))
        num_blocks = pages_of(sequence.num_computed + 1)
        while (room := self.allocator.extend(sequence, num_blocks, renewal)) is Room.NONE:
            if self.allocator.clock.fence is not None:
                self._must_preempt = True
                return False
            victim = self._victim()
            self.preempt(victim)
            if victim is sequence:
                return False
        return room is Room.MADE

    def _victim(self) -> Sequence:
        """Last by priority and arrival. A prompt that a reader follows is never taken back."""
        holders = [*self.state.sequences, *self.ready.members()]
        return max((s for s in holders if not s.group.prefill_only), key=lambda s: s.order)

    def _hoped_s(self, decodes: list[Scheduled]) -> float:
        """The least that one of them hopes for between its tokens; 0: none says anything."""
        if not self._has_hopes:
            return 0.0
        hopes = (entry.sequence.group.spec.itl_ms for entry in decodes)
        return min((itl_ms for itl_ms in hopes if itl_ms), default=0.0) / 1000

    def _running_chunks(self, budget: StepBudget) -> list[Scheduled]:
        chunks: list[Scheduled] = []
        running = [s for s in self.state.sequences if s.num_tokens - s.num_computed > 1]
        for sequence in sorted(running, key=lambda s: s.order):
            if budget.is_spent:
                break
            chunk = self._chunk(sequence, budget)
            if chunk is not None:
                chunks.append(chunk)
        return chunks

    def _chunk(self, sequence: Sequence, budget: StepBudget) -> Scheduled | None:
        """None: it, what is to be scored of it, or a page that it was promised, has to wait for
        the next step."""
        context = sequence.num_computed
        most = min(budget.tokens_behind(context), self.allowances.max_chunk_tokens)
        if self._scores_of(sequence):
            most = min(most, self._num_unscored)
        if most <= 0:
            return None
        num_new = chunk_len(sequence, most)
        num_blocks = pages_of(sequence.num_computed + num_new)
        if self.allocator.extend(sequence, num_blocks) is not Room.MADE:
            self.num_stuck += 1
            return None
        entry = schedule(sequence, num_new)
        budget.spend(num_new, context)
        self._num_unscored -= len(entry.scored)
        return entry

    def _scores_of(self, sequence: Sequence) -> range:
        return sequence.group.to_score(sequence.num_computed, sequence.num_tokens)

    def _admit(self, budget: StepBudget, decodes: list[Scheduled], chunks: list[Scheduled]) -> None:
        while not budget.is_spent and not self.state.is_full:
            sequence = self.waiting.first()
            if sequence is None or (self._scores_of(sequence) and not self._num_unscored):
                return
            if not self._take_in():
                return
            entry = self._chunk(sequence, budget) if sequence.row >= 0 else None
            if entry is not None:
                (decodes if sequence.num_remaining == 1 else chunks).append(entry)

    def _take_in(self) -> bool:
        """The first one that waits: into a row, or away, to be filled. False: no pages for it."""
        sequence = self.waiting.first()
        assert sequence is not None
        grant = self._grant(sequence)
        if grant is None:
            return False
        self.waiting.discard(sequence)
        if grant.missing:
            self.on_fill(sequence, grant.missing)
        else:
            self.newly_admitted.append(sequence)
            self.state.add(sequence)
        return True

    def _grant(self, sequence: Sequence) -> Grant | None:
        """The last token is always computed here, and what is to be scored or pooled: cached pages
        have no logits and no hidden states."""
        group = sequence.group
        max_hits = (sequence.num_tokens - 1) // PAGE_TOKENS
        for wanted in (self._scores_of(sequence), group.to_pool(0, sequence.num_tokens)):
            if wanted:
                max_hits = min(max_hits, wanted.start // PAGE_TOKENS)
        group.num_offered = min(group.num_offered, max_hits)
        before = sequence.num_remaining
        allowance = self._allowance(sequence)
        grant = self.allocator.grant(sequence, max_hits, allowance, group.num_offered)
        if grant is None:
            return None
        self.waiting.num_tokens -= before - sequence.num_remaining
        if group.num_cached_tokens < 0 and not grant.missing:
            num_cached = grant.num_hits * PAGE_TOKENS
            group.num_cached_tokens = min(num_cached, group.spec.num_prompt_tokens)
        return grant

    def _allowance(self, sequence: Sequence) -> Pages:
        group = sequence.group
        if group.is_only_prompt:
            return self.allowances.of_prompt(sequence)
        num_choices = len(group.choices) if group.leader is sequence else 1
        return self.allowances.of_request(sequence, num_choices)


def _no_fill(sequence: Sequence, missing: list[GrantedRun]) -> None:
    raise AssertionError("nobody offers KV to this scheduler")


def chunk_len(sequence: Sequence, budget: int) -> int:
    """Tokens of the next chunk: all that remain, or up to a border of pages within the budget."""
    if sequence.num_remaining <= budget:
        return sequence.num_remaining
    start = sequence.num_computed
    end = (start + budget) // PAGE_TOKENS * PAGE_TOKENS
    return end - start if end > start else budget
