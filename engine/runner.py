"""Turns a plan into tensors, runs the model, launches sampling."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.batch_state import BatchState
from paceline.engine.cuda_graph import DecodeGraphs
from paceline.engine.logit_edits import LogitEdits
from paceline.engine.messages import PositionLogprobs
from paceline.engine.plan import Plan
from paceline.engine.position_logprobs import position_logprobs
from paceline.engine.sampler import Drawn, SampleBatch, Sampled, collect, sample
from paceline.kernels.token_scores import TokenScores, token_scores
from paceline.models.base import ForwardBatch, Model, PrefillChunk

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """What P rows of logits are scored for; arrays of length P."""

    token_ids: Int64s  # that come next in the prompt
    num_top: Int64s  # best tokens that are asked for


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step before its launch. Without `samples` no sequence reaches its last token.

    The first rows of logits are drawn from, the others are scored."""

    batch: ForwardBatch
    samples: SampleBatch | None
    scores: ScoreBatch | None


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way. Nothing is drawn when no sequence reaches its last token."""

    prepared: Prepared
    drawn: Drawn | None
    scores: TokenScores | None
    done: "torch.cuda.Event | None"

    def collect(self) -> tuple[Sampled, list[PositionLogprobs | None]]:
        """Waits for the step. Returns what was drawn, and the scores in the order of the plan."""
        if self.done is not None:
            self.done.synchronize()
        sampled, scored = Sampled([], [], []), list[PositionLogprobs | None]()
        if self.drawn is not None and self.prepared.samples is not None:
            sampled = collect(self.drawn, self.prepared.samples)
        if self.scores is not None and self.prepared.scores is not None:
            batch = self.prepared.scores
            scored = position_logprobs(
                self.scores, batch.token_ids.tolist(), batch.num_top.tolist()
            )
        return sampled, scored


@dataclass(frozen=True, slots=True)
class PlanArrays:
    """A plan as arrays: of length B, except `contexts`-derived ones that say so."""

    rows: Int64s  # of the batch state
    lengths: Int64s  # new tokens
    contexts: Int64s  # after the step
    starts: Int64s  # [B + 1]
    num_draws: Int64s
    num_decodes: int


class Runner:
    """Runs one model over its pools. `graphs` replay pure decode steps (CUDA only)."""

    def __init__(
        self,
        model: Model,
        pools: tuple[torch.Tensor, ...],
        state: BatchState,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model = model
        self.pools = pools
        self.state = state
        self.graphs = graphs
        self.device = pools[0].device

    @torch.inference_mode()
    def prepare(self, plan: Plan) -> Prepared:
        """All that a step reads of the batch state, copied."""
        arrays = self.arrays(plan)
        samples = self._samples(plan, arrays) if arrays.num_draws.any() else None
        return Prepared(self.batch(plan, arrays), samples, _scores(plan))

    @torch.inference_mode()
    def run(self, prepared: Prepared) -> Launched:
        """Forward and sampling. Reads and writes the pools; knows nothing of the batch state."""
        batch, samples = prepared.batch, prepared.samples
        if self.graphs is not None and self.graphs.fits(batch):
            logits = self.graphs.replay(batch)
        else:
            logits = self.model.forward(batch, self.pools)
        drawn = scores = done = None
        num_drawn_from = len(logits)
        if prepared.scores is not None:
            num_drawn_from -= len(prepared.scores.token_ids)
            scores = token_scores(
                logits[num_drawn_from:],
                torch.from_numpy(prepared.scores.token_ids).to(self.device),
                int(prepared.scores.num_top.max()),
            )
        if samples is not None:
            drawn = sample(logits[:num_drawn_from], samples)
        if self.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return Launched(prepared, drawn, scores, done)

    @torch.inference_mode()
    def copy_pages(self, sources: list[int], destinations: list[int]) -> None:
        """Whole pages within the pool, in order with the steps."""
        source = torch.tensor(sources, device=self.device)
        destination = torch.tensor(destinations, device=self.device)
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

    def batch(self, plan: Plan, arrays: PlanArrays) -> ForwardBatch:
        """What the model gets, on its device."""
        contexts, num_decodes = arrays.contexts, arrays.num_decodes
        num_blocks = (int(contexts.max()) - 1) // PAGE_TOKENS + 1
        all_tables = self.state.block_tables
        tables = [all_tables[arrays.rows, i, :num_blocks] for i in range(all_tables.shape[1])]
        token_ids, positions, owners = self._packed(plan, arrays)
        blocks, offsets = positions // PAGE_TOKENS, positions % PAGE_TOKENS
        slots = [table[owners, blocks] * PAGE_TOKENS + offsets for table in tables]
        ends = arrays.starts[1:]
        scored = [
            start - entry.sequence.num_computed + np.asarray(entry.scored, np.int64)
            for start, entry in zip(arrays.starts, plan.scheduled, strict=False)
            if entry.scored
        ]
        logits_rows = np.concatenate((ends[arrays.num_draws > 0] - 1, *scored))
        common = (token_ids, positions, arrays.starts, contexts, logits_rows)
        tensors = self._on_device(*common, *slots, *tables)
        of_groups = tensors[len(common) :]
        return ForwardBatch(
            token_ids=tensors[0],
            positions=tensors[1],
            slot_mappings=of_groups[: len(slots)],
            query_start=tensors[2],
            context_lens=tensors[3],
            block_tables=of_groups[len(slots) :],
            logits_rows=tensors[4],
            max_query_len=int(arrays.lengths.max()),
            max_context_len=int(contexts[:num_decodes].max(initial=0)),
            prefills=tuple(
                PrefillChunk(entry.num_new, int(context))
                for entry, context in zip(plan.chunks, contexts[num_decodes:], strict=True)
            ),
        )

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
            edits=_edits(plan),
        )

    def _on_device(self, *arrays: Int64s) -> tuple[torch.Tensor, ...]:
        """In one copy: each costs some 10 µs in which a device waits for us."""
        if self.device.type == "cpu":
            return tuple(map(torch.from_numpy, arrays))
        packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        sizes = [array.size for array in arrays]
        parts = packed.to(self.device, non_blocking=True).split(sizes)  # type: ignore[no-untyped-call]
        return tuple(part.view(array.shape) for part, array in zip(parts, arrays, strict=True))


def _edits(plan: Plan) -> LogitEdits | None:
    drawing = [entry.sequence for entry in plan.scheduled for _ in entry.choices]
    edited = [(i, s) for i, s in enumerate(drawing) if s.group.edits is not None]
    return LogitEdits(edited) if edited else None


def _scores(plan: Plan) -> ScoreBatch | None:
    scored = [entry for entry in plan.scheduled if entry.scored]
    if not scored:
        return None
    next_ids = [e.sequence.tokens[e.scored.start + 1 : e.scored.stop + 1] for e in scored]
    num_top = [e.sequence.group.spec.sampling.num_prompt_logprobs for e in scored]
    lengths = [len(ids) for ids in next_ids]
    return ScoreBatch(np.concatenate(next_ids), np.repeat(num_top, lengths))
