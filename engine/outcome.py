"""What the result of a step changes: progress, committed blocks, tokens, endings."""

import math

import numpy as np

from paceline.core.errors import EngineFailure, InvalidRequest, PacelineError
from paceline.core.finish import FinishReason
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.groups import Groups
from paceline.engine.messages import (
    Embedding,
    Emission,
    FirstToken,
    HandoffReady,
    KeyRun,
    Pin,
    Pinned,
    PositionLogprobs,
    PromptScored,
)
from paceline.engine.pins import pin_for_reader
from paceline.engine.plan import Plan, Scheduled
from paceline.engine.pooling import Floats
from paceline.engine.pools import Sums
from paceline.engine.prefix_cache import Tail
from paceline.engine.promise import FilledBlocks
from paceline.engine.sampler import Sampled
from paceline.engine.sequence import Group, Sequence, Stage
from paceline.engine.step_parts import StepResult

MAX_REST_PAGES = 128  # pinned with a record: a reader copies them in one go


class Outcome:
    """Results of a sequence that was preempted or ended since the launch are dropped."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def apply(self, plan: Plan, result: StepResult) -> None:
        current = [entry.sequence for entry in plan.scheduled if entry.is_current]
        self._commit_blocks(current, result.promise.filled, result.block_sums)
        for sequence in current:
            self.groups.allocator.slide(sequence)
        self._announce_scores(plan, result.scored)
        self._pool(plan, result.pooled)
        self._keep_tails(result)
        first = 0
        for entry in plan.scheduled:
            last = first + len(entry.choices)
            if last > first and entry.is_current:
                self._accept(entry, result.sampled, first, last)
            first = last

    def _commit_blocks(
        self, sequences: list[Sequence], all_filled: list[FilledBlocks], sums: Sums
    ) -> None:
        """Names all blocks that this step filled."""
        first = 0
        for filled in all_filled:
            last = first + len(filled.blocks)
            if filled.entry.is_current:
                sequence, group = filled.entry.sequence, filled.group
                self.groups.allocator.commit(sequence, group, filled.blocks, sums[first:last])
            first = last
        for sequence in sequences:
            if sequence.num_computed // PAGE_TOKENS > sequence.num_committed:
                sequence.num_committed = sequence.num_computed // PAGE_TOKENS
                self.groups.announce(sequence.group, sequence.num_committed)

    def _keep_tails(self, result: StepResult) -> None:
        """The partial pages of prompts that are held: their reader asks for them by slot."""
        cache = self.groups.allocator.cache
        for tail, sums in zip(result.promise.tails, result.tail_sums, strict=True):
            if tail.entry.is_current:
                slot = tail.entry.sequence.group.slot
                with cache.pool.lock:
                    cache.tails[slot] = Tail(tuple(tail.pages), tail.num_tokens, tuple(sums))

    def _announce_scores(self, plan: Plan, scored: list[PositionLogprobs | None]) -> None:
        first = 0
        for entry in plan.scheduled:
            last = first + len(entry.scored)
            if last > first and entry.is_current:
                self._announce_part(entry, [s for s in scored[first:last] if s is not None])
            first = last

    def _announce_part(self, entry: Scheduled, scores: list[PositionLogprobs]) -> None:
        group = entry.sequence.group
        if any(math.isnan(score.logprob) for score in scores):
            error = EngineFailure("the model returned logits that are not numbers")
            self.groups.fail(group, error)
            return
        group.num_scored = entry.scored.stop
        self.groups.events.append(PromptScored(group.slot, entry.scored.start + 1, scores))

    def _pool(self, plan: Plan, totals: list[Floats]) -> None:
        pooled = [entry for entry in plan.scheduled if entry.pooled]
        for entry, total in zip(pooled, totals, strict=True):
            if entry.is_current:
                self._add_states(entry, total)

    def _add_states(self, entry: Scheduled, total: Floats) -> None:
        group = entry.sequence.group
        states = group.pooled
        assert states is not None, "of no other sequence"
        states.add(entry.pooled, total)
        if not np.isfinite(total).all():
            error = EngineFailure("the model returned hidden states that are not numbers")
            self.groups.fail(group, error)
        elif states.is_complete:
            vector = states.mean().astype("<f4").tobytes()
            self.groups.events.append(Embedding(group.slot, vector, group.num_cached_tokens))
            self.groups.end(group)

    def _accept(self, entry: Scheduled, sampled: Sampled, first: int, last: int) -> None:
        sequence = entry.sequence
        group = sequence.group
        for draw in range(first, last):
            error = _problem(sequence, sampled, draw)
            if error is not None:
                self.groups.fail(group, error)
                return
        emissions = [
            self._emission(sequence, choice, token_id, logprobs)
            for choice, token_id, logprobs in zip(
                entry.choices,
                sampled.token_ids[first:last],
                sampled.logprobs[first:last],
                strict=True,
            )
            if choice in group.choices
        ]
        self.groups.events += emissions
        if group.leader is sequence:
            self._after_first_tokens(group, sequence, emissions)
        elif emissions[0].finish is not None:
            self.groups.end_choice(sequence)
        else:
            self.groups.scheduler.state.append(sequence, emissions[0].token_ids[0])

    def _emission(
        self, sequence: Sequence, choice: int, token_id: int, logprobs: PositionLogprobs | None
    ) -> Emission:
        group, num_known = sequence.group, sequence.num_known
        num_cached_tokens = 0 if sequence.has_emitted else group.num_cached_tokens
        return Emission(
            slot=group.slot,
            choice=choice,
            position=num_known - group.spec.num_prompt_tokens,
            token_ids=[token_id],
            logprobs=[] if logprobs is None else [logprobs],
            finish=finish_reason(group, token_id, num_known + 1),
            num_cached_tokens=num_cached_tokens,
        )

    def _after_first_tokens(
        self, group: Group, leader: Sequence, emissions: list[Emission]
    ) -> None:
        if group.prefill_only:
            self._hold(group, leader, emissions)
            return
        tokens = [(e.choice, e.token_ids[0]) for e in emissions if e.finish is None]
        if not tokens:
            self.groups.end(group)
            return
        self.groups.fork(group, tokens)
        for sequence in group.sequences:
            sequence.has_emitted = True

    def _hold(self, group: Group, leader: Sequence, emissions: list[Emission]) -> None:
        """Keeps the KV for its reader."""
        self.groups.scheduler.drop(leader, Stage.HELD)
        self.groups.allocator.give_back_credit(leader)
        firsts = [FirstToken(e.choice, e.token_ids[0], e.finish) for e in emissions]
        goes_on = any(first.finish is None for first in firsts)
        rest = self._pin_rest(group, leader) if goes_on else None
        self.groups.events.append(HandoffReady(group.slot, leader.num_tokens, firsts, rest))

    def _pin_rest(self, group: Group, leader: Sequence) -> Pinned | None:
        """What the reader lacks: asking for it would cost it a call to our front and one to here.
        None if that is not known, or more than it copies in one go."""
        if group.reader_lacks is None:
            return None
        keys = leader.keys[: leader.num_tokens // PAGE_TOKENS]
        runs = [KeyRun(i, keys[first:]) for i, first in enumerate(group.reader_lacks)]
        num_pages = sum(len(run.keys) for run in runs) + len(leader.tables)
        if num_pages > MAX_REST_PAGES:
            return None
        cache = self.groups.allocator.cache
        pinned = pin_for_reader(cache, Pin(runs, group.slot))
        if list(map(len, pinned.runs)) == [len(run.keys) for run in runs]:
            return pinned
        for page in pinned.pages:  # a name was dropped: what is left does not end with the prompt
            cache.pool.unpin(page.page, page.generation)
        return None


def _problem(sequence: Sequence, sampled: Sampled, draw: int) -> PacelineError | None:
    """Why no token can be drawn: one of the request's processors has thrown or all is masked,
    which no other worker would change, or the logits are of no use."""
    if draw in sampled.failed:
        reason = f"failed at position {sequence.num_outputs} of the output"
        return InvalidRequest("logits_processors", sampled.failed[draw], reason)
    best = sampled.best[draw]
    if math.isfinite(best):
        return None
    edits = sequence.group.edits
    if edits is not None and best == -math.inf:
        masked = edits.dead_end(sequence.output)
        if masked is not None:
            return masked
    return EngineFailure("no token can be drawn: logits are not finite")


def finish_reason(group: Group, token_id: int, num_tokens: int) -> FinishReason | None:
    """Whether a choice ends with this token, its `num_tokens`-th."""
    if token_id in group.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= group.max_length else None
