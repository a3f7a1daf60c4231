"""Runs every kind of step once on a device, before the first request comes.

Kernels are compiled when they are first launched and decode steps are captured when they first
run: seconds each, in which streams would stand still. Nothing is in use yet, so one page of the
pool takes all that is written.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.batch_state import TABLE_WIDTHS
from paceline.engine.cuda_graph import DecodeGraphs, DecodeStep, rungs
from paceline.engine.runner import Runner
from paceline.engine.sampler import SampleBatch, sample
from paceline.kernels.decode_inputs import DecodeRows
from paceline.models.base import ForwardBatch, PrefillChunk

Progress = Callable[[int, int], None]  # steps done, of how many

_SHORT_CHUNK = 16  # tokens; chunks of 4, 16, … times as many have kernels of their own


@torch.inference_mode()
def warm_up(
    runner: Runner, page: int, max_chunk_tokens: int, max_length: int, progress: Progress
) -> None:
    """`page` is overwritten. Raises what torch raises, RuntimeError for want of memory."""
    steps = list(_eager_steps(runner, page, max_chunk_tokens, max_length))
    steps.append(partial(_others, runner, page))
    if runner.graphs is not None:
        steps += _captures(runner.graphs)
        steps.append(partial(_replay, runner))
    for done, step in enumerate(steps, 1):
        step()
        progress(done, len(steps))


def _eager_steps(
    runner: Runner, page: int, max_chunk_tokens: int, max_length: int
) -> Iterator[Callable[[], object]]:
    """Chunks alone, and beside decodes; the longest first, whose memory serves the others."""
    longest = min(max_chunk_tokens, max_length)
    shapes = [(0, num) for num in rungs(min(_SHORT_CHUNK, longest), 4, longest)]
    shapes += [(num, 1) for num in rungs(1, 2, runner.state.max_running)]
    for num_decodes, num_new in reversed(shapes):
        yield partial(_eager_step, runner, page, num_decodes, num_new, max_length)


def _eager_step(runner: Runner, page: int, num_decodes: int, num_new: int, max_length: int) -> None:
    batch = step_batch(runner, page, num_decodes, num_new, max_length)
    runner.model.forward(batch, runner.pools)


def step_batch(
    runner: Runner, page: int, num_decodes: int, num_new: int, max_length: int
) -> ForwardBatch:
    """Decodes of contexts of one token, and a prompt of `num_new`; all KV in one page."""
    device, num_groups = runner.device, len(runner.model.layout.groups)
    width = -(-num_new // (PAGE_TOKENS * TABLE_WIDTHS)) * TABLE_WIDTHS
    starts = torch.arange(num_decodes + 2, device=device)
    starts[-1] = num_decodes + num_new
    contexts = torch.ones(num_decodes + 1, dtype=torch.int64, device=device)
    contexts[-1] = num_new
    zeros = torch.zeros(num_decodes + num_new, dtype=torch.int64, device=device)
    positions = zeros.clone()
    positions[num_decodes:] = torch.arange(num_new, device=device)
    slots = torch.full_like(zeros, page * PAGE_TOKENS)
    table = zeros.new_full((num_decodes + 1, width), page)
    return ForwardBatch(
        token_ids=zeros,
        positions=positions,
        slot_mappings=(slots,) * num_groups,
        query_start=starts,
        context_lens=contexts,
        block_tables=(table,) * num_groups,
        logits_rows=starts[1:] - 1,
        max_query_len=num_new,
        max_context_len=max_length if num_decodes else 0,
        prefills=(PrefillChunk(num_new, num_new),),
        wants_last_rows=True,
    )


def _others(runner: Runner, page: int) -> None:
    """What comes beside forward passes: sampling with every option, checksums, copies."""
    logits = torch.zeros(2, runner.model.vocab_size, device=runner.device)
    is_random = np.arange(2)
    sample(
        logits,
        SampleBatch(
            rows=np.arange(2),
            temperature=is_random.astype(np.float32),
            min_p=np.full(2, 0.1, np.float32),
            top_k=is_random * 4,
            top_p=np.full(2, 0.9, np.float32),
            typical_p=np.full(2, 0.9, np.float32),
            seed=is_random,
            choice=is_random,
            position=is_random,
            num_logprobs=is_random,
        ),
    )
    for num_tokens in (None, 1, PAGE_TOKENS - 1):
        runner.sums([page], num_tokens)
    runner.copy_pages([page], [page])


def _captures(graphs: DecodeGraphs) -> Iterator[Callable[[], object]]:
    for rung, context in graphs.all_rungs():
        yield partial(graphs.capture, rung, context)


def _replay(runner: Runner) -> None:
    """Of one row, whose inputs are made by a kernel too."""
    assert runner.graphs is not None
    zero = torch.zeros(1, dtype=torch.int64, device=runner.device)
    page = runner.graphs.scratch_page
    tables = zero.new_full((1, len(runner.model.layout.groups), TABLE_WIDTHS), page)
    runner.graphs.replay(DecodeStep(DecodeRows(zero, zero + 1, zero, zero, tables), 1))
