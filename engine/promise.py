"""What a step under way is sure to bring, before its result is known.

Between the launches of its forward pass and of its sampling the batch moves on to where it will
be: tokens are computed, blocks are full, and each sequence that goes on has one more token, to be
known later. So the next step can be planned and launched while this one runs.

A stop token is a surprise: such a sequence has computed one token too many when it ends, which is
dropped as everything is that belongs to another epoch. An end by length is none. Prompts that fork
or are held for a reader wait for their first tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.batch_state import BatchState
from paceline.engine.logit_edits import LogitEdits
from paceline.engine.page_pool import PagePool
from paceline.engine.plan import Plan, Scheduled
from paceline.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class FilledBlocks:
    """Pages of one sequence and page group, without names, that this step fills."""

    entry: Scheduled
    group: int
    blocks: list[int]
    pages: list[int]


@dataclass(frozen=True, slots=True)
class FilledTail:
    """The partial last pages of a prompt, one a group, that will be held for a reader."""

    entry: Scheduled
    pages: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Promise:
    """`edits`: of the logits of this step; they depend on all tokens before."""

    edits: LogitEdits | None
    filled: list[FilledBlocks]
    tails: list[FilledTail]


def promise(plan: Plan, state: BatchState, pool: PagePool) -> Promise:
    """Moves `state` on. What the step before has drawn must be known: edits depend on it."""
    edits = _edits(plan)
    filled: list[FilledBlocks] = []
    tails: list[FilledTail] = []
    draw = 0
    for entry in plan.scheduled:
        sequence, num_choices = entry.sequence, len(entry.choices)
        if entry.is_current:
            state.advance(sequence, entry.num_new)
            if sequence.num_computed // PAGE_TOKENS > sequence.num_committed:
                filled += _filled(entry, pool)
            if num_choices and sequence.group.prefill_only:
                tails += _tail(entry)
            elif num_choices == 1 and not _ends(sequence):
                state.promise(sequence, draw)
        draw += num_choices
    return Promise(edits, filled, tails)


def _edits(plan: Plan) -> LogitEdits | None:
    edited: list[tuple[int, Sequence]] = []
    draw = 0
    for entry in plan.scheduled:
        if entry.sequence.group.edits is not None and entry.is_current:
            edited += [(draw + i, entry.sequence) for i in range(len(entry.choices))]
        draw += len(entry.choices)
    return LogitEdits(edited) if edited else None


def _filled(entry: Scheduled, pool: PagePool) -> Iterator[FilledBlocks]:
    """Those that have a name were pulled, or are shared."""
    sequence = entry.sequence
    last = sequence.num_computed // PAGE_TOKENS
    for group, table in enumerate(sequence.tables):
        blocks = [
            block
            for block in range(max(sequence.num_committed, table.first), last)
            if pool.pages[table.pages[block]].key is None
        ]
        if blocks:
            yield FilledBlocks(entry, group, blocks, [table.pages[block] for block in blocks])


def _tail(entry: Scheduled) -> list[FilledTail]:
    num_tokens = entry.sequence.num_tokens % PAGE_TOKENS
    pages = [table.pages[-1] for table in entry.sequence.tables]
    return [FilledTail(entry, pages, num_tokens)] if num_tokens else []


def _ends(sequence: Sequence) -> bool:
    """Whether its next token is its last, whichever it is."""
    return sequence.num_tokens + 1 >= sequence.group.max_length
