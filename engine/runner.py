"""Turns a plan into tensors, runs the model, launches sampling."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.batch_state import TABLE_WIDTHS, BatchState
from paceline.engine.cuda_graph import DecodeGraphs, DecodeStep
from paceline.engine.plan import Plan, Scheduled
from paceline.engine.pooling import sums_of
from paceline.engine.pools import PageSums
from paceline.engine.promise import Promise
from paceline.engine.sampler import SampleBatch, sample
from paceline.engine.step_parts import (
    Forwarded,
    Int64s,
    Launched,
    PlanArrays,
    Prepared,
    ScoreBatch,
)
from paceline.kernels import backend
from paceline.kernels.decode_inputs import DecodeRows, known_tokens, write_tables
from paceline.kernels.token_scores import token_scores
from paceline.kernels.transfer import to_device, to_host, to_kernels
from paceline.models.base import ForwardBatch, Model, PrefillChunk

_MAX_STAGED = 4  # steps whose inputs are kept: one runs while another is launched


class Runner:
    """Runs one model over its pools. `graphs` replay pure decode steps (CUDA only).

    A step is launched in two parts, its forward pass and its sampling; in between comes what the
    step before has drawn. A decode step launched before that finds its tokens on the device.
    """

    def __init__(
        self,
        model: Model,
        pools: tuple[torch.Tensor, ...],
        state: BatchState,
        sums: PageSums,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model = model
        self.pools = pools
        self.state = state
        self.sums = sums
        self.graphs = graphs
        self.device = pools[0].device
        self._next_ids = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._tables = torch.zeros(0)
        self._staged = deque[torch.Tensor](maxlen=_MAX_STAGED)
        if self.device.type != "cpu":
            tables = state.block_tables
            self._tables = torch.zeros(tables.shape, dtype=torch.int64, device=self.device)

    @torch.inference_mode()
    def prepare(self, plan: Plan) -> Prepared:
        """All that a step reads of the batch state, copied."""
        arrays, scores = self.arrays(plan), _scores(plan)
        samples = self._samples(plan, arrays) if arrays.num_draws.any() else None
        pooled = tuple(len(entry.pooled) for entry in plan.scheduled if entry.pooled)
        is_plain = not plan.chunks and scores is None and not pooled
        is_captured = self.graphs is not None and is_plain
        batch = self._decode_step(arrays) if is_captured else self.batch(plan, arrays)
        return Prepared(batch, samples, scores, pooled)

    @torch.inference_mode()
    def forward(self, prepared: Prepared) -> Forwarded:
        """Logits, one row a drawing sequence and one a scored position, and what is pooled. Reads
        and writes the pools; knows nothing of the batch state."""
        batch, model = prepared.batch, self.model
        if not isinstance(batch, ForwardBatch):
            assert self.graphs is not None
            return Forwarded(self.graphs.replay(batch))
        if not prepared.pooled:
            return Forwarded(model.forward(batch, self.pools))
        states = model.hidden_states(batch, self.pools)
        num_logits = len(states) - sum(prepared.pooled)
        pooled = sums_of(states[num_logits:], prepared.pooled)
        return Forwarded(model.logits(states[:num_logits]), pooled)

    @torch.inference_mode()
    def sample(self, prepared: Prepared, forwarded: Forwarded, promise: Promise) -> Launched:
        """The second part of a step, with all that it brings beside logits."""
        samples, scored_for, logits = prepared.samples, prepared.scores, forwarded.logits
        drawn = scores = block_sums = done = None
        pooled = None if forwarded.pooled is None else to_host(forwarded.pooled)
        num_drawn_from = len(logits)
        if scored_for is not None:
            num_drawn_from -= len(scored_for.token_ids)
            (next_ids,) = to_device(self.device, scored_for.token_ids)
            num_top = int(scored_for.num_top.max())
            scores = token_scores(logits[num_drawn_from:], next_ids, num_top).to_host()
        if samples is not None:
            samples = replace(samples, edits=promise.edits)
            drawn = sample(logits[:num_drawn_from], samples)
            self._next_ids = drawn.next_ids
        if promise.filled:
            pages = [page for filled in promise.filled for page in filled.pages]
            block_sums = to_host(self.sums.launch(pages))
        tail_sums = [to_host(self.sums.launch(t.pages, t.num_tokens)) for t in promise.tails]
        if self.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        sums = (block_sums, tail_sums)
        return Launched(promise, samples, drawn, scores, scored_for, pooled, *sums, done)

    def give_back_memory(self) -> None:
        """After a forward pass that failed for want of it: also waits for what it had launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def copy_pages(self, sources: list[int], destinations: list[int]) -> None:
        """Whole pages within the pool, in order with the steps."""
        pages = (np.asarray(sources, np.int64), np.asarray(destinations, np.int64))
        source, destination = to_device(self.device, *pages)
        for pool in self.pools:
            pool[destination] = pool[source]

    def arrays(self, plan: Plan) -> PlanArrays:
        scheduled = plan.scheduled
        num = len(scheduled)
        rows = np.fromiter([entry.sequence.row for entry in scheduled], np.int64, num)
        lengths = np.ones(num, np.int64)
        num_draws = np.ones(num, np.int64)
        for i, entry in enumerate(plan.chunks, len(plan.decodes)):
            lengths[i] = entry.num_new
        for i, entry in enumerate(scheduled):
            num_draws[i] = len(entry.choices)
        starts = np.zeros(num + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        contexts = self.state.computed[rows] + lengths
        return PlanArrays(rows, lengths, contexts, starts, num_draws, len(plan.decodes))

    def _decode_step(self, arrays: PlanArrays) -> DecodeStep:
        """For a graph: the device has the block tables, less what has changed of them."""
        tokens = self.state.next_token[arrays.rows]
        changes = self.state.take_changes()
        small = (arrays.rows, arrays.contexts, tokens, *changes)
        if backend.uses_triton(self._tables):
            rows, contexts, ids, places, pages = to_kernels(*small)
            self._staged.append(rows)
        else:
            rows, contexts, ids, places, pages = to_device(self.device, *small)
        write_tables(self._tables, places, pages)
        decodes = DecodeRows(rows, contexts, ids, self._next_ids, self._tables)
        return DecodeStep(decodes, int(arrays.contexts.max()))

    def batch(self, plan: Plan, arrays: PlanArrays) -> ForwardBatch:
        """What the model gets, on its device."""
        contexts, num_decodes = arrays.contexts, arrays.num_decodes
        token_ids, positions, owners = self._packed(plan, arrays)
        all_tables, blocks = self.state.block_tables, positions // PAGE_TOKENS
        offsets = positions % PAGE_TOKENS
        slots = [
            all_tables[arrays.rows[owners], i, blocks] * PAGE_TOKENS + offsets
            for i in range(all_tables.shape[1])
        ]
        ends = arrays.starts[1:]
        scored = _rows(plan, arrays, lambda entry: entry.scored)
        pooled = _rows(plan, arrays, lambda entry: entry.pooled)
        logits_rows = np.concatenate((ends[arrays.num_draws > 0] - 1, *scored, *pooled))
        common = (token_ids, positions, arrays.starts, contexts, logits_rows)
        tensors = to_device(self.device, *common, *slots)
        ids = tensors[0]
        if (token_ids < 0).any():
            ids = known_tokens(ids, self._next_ids)
        return ForwardBatch(
            token_ids=ids,
            positions=tensors[1],
            slot_mappings=tensors[len(common) :],
            query_start=tensors[2],
            context_lens=tensors[3],
            block_tables=self._block_tables(arrays),
            logits_rows=tensors[4],
            max_query_len=int(arrays.lengths.max()),
            max_context_len=int(contexts[:num_decodes].max(initial=0)),
            prefills=tuple(
                PrefillChunk(entry.num_new, int(context))
                for entry, context in zip(plan.chunks, contexts[num_decodes:], strict=True)
            ),
            wants_last_rows=not scored and bool(arrays.num_draws.all()),
        )

    def _block_tables(self, arrays: PlanArrays) -> tuple[torch.Tensor, ...]:
        """By page group, as wide as the longest context."""
        num_blocks = (int(arrays.contexts.max()) - 1) // PAGE_TOKENS + 1
        tables = self.state.block_tables
        groups = range(tables.shape[1])
        if self.device.type == "cpu":
            return tuple(torch.from_numpy(tables[arrays.rows, i, :num_blocks]) for i in groups)
        num_blocks = -(-num_blocks // TABLE_WIDTHS) * TABLE_WIDTHS
        rows, *changes = to_device(self.device, arrays.rows, *self.state.take_changes())
        write_tables(self._tables, *changes)
        return tuple(self._tables[:, i, :num_blocks][rows] for i in groups)

    def _packed(self, plan: Plan, arrays: PlanArrays) -> tuple[Int64s, Int64s, Int64s]:
        """Token ids, positions, and the sequence that owns each new token."""
        num = len(arrays.rows)
        decode_tokens = self.state.next_token[arrays.rows[: arrays.num_decodes]]
        if not plan.chunks:
            return decode_tokens, arrays.contexts - 1, np.arange(num)
        tokens = [decode_tokens]
        for entry in plan.chunks:
            start = entry.sequence.num_computed
            tokens.append(entry.sequence.tokens[start : start + entry.num_new])
        owners = np.repeat(np.arange(num), arrays.lengths)
        first = arrays.contexts - arrays.lengths - arrays.starts[:-1]
        return np.concatenate(tokens), np.arange(len(owners)) + first[owners], owners

    def _samples(self, plan: Plan, arrays: PlanArrays) -> SampleBatch:
        """One draw for each sequence that reached its last token; one a choice before the fork."""
        state, num_draws = self.state, arrays.num_draws
        owners = np.repeat(np.arange(len(num_draws)), num_draws)
        rows = arrays.rows[owners]
        position = arrays.contexts[owners] - state.num_prompt_tokens[rows]
        drawing = num_draws[num_draws > 0]
        choices = [choice for entry in plan.scheduled for choice in entry.choices]
        return SampleBatch(
            rows=np.repeat(np.arange(len(drawing)), drawing),
            temperature=state.temperature[rows],
            min_p=state.min_p[rows],
            top_k=state.top_k[rows],
            top_p=state.top_p[rows],
            typical_p=state.typical_p[rows],
            seed=state.seed[rows],
            choice=np.asarray(choices, np.int64),
            position=position,
            num_logprobs=state.num_logprobs[rows],
        )


def _rows(plan: Plan, arrays: PlanArrays, positions: Callable[[Scheduled], range]) -> list[Int64s]:
    """Of a step's tokens those at `positions` of their sequences."""
    return [
        start - entry.sequence.num_computed + np.asarray(found, np.int64)
        for start, entry in zip(arrays.starts, plan.scheduled, strict=False)
        if (found := positions(entry))
    ]


def _scores(plan: Plan) -> ScoreBatch | None:
    scored = [entry for entry in plan.scheduled if entry.scored]
    if not scored:
        return None
    next_ids = [e.sequence.tokens[e.scored.start + 1 : e.scored.stop + 1] for e in scored]
    num_top = [e.sequence.group.spec.sampling.num_prompt_logprobs for e in scored]
    lengths = [len(ids) for ids in next_ids]
    return ScoreBatch(np.concatenate(next_ids), np.repeat(num_top, lengths))
