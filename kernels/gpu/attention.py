"""Attention of a step on a CUDA device: decode sequences and prefill chunks, each by its kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.kernels.gpu import hopper_attention
from paceline.kernels.gpu.decode_attention import DecodeItems, attend_decodes, plan_items
from paceline.kernels.gpu.prefill_attention import attend_chunks
from paceline.kernels.transfer import to_device


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What all layers of a step share."""

    slot_mapping: torch.Tensor  # [T]
    block_table: torch.Tensor  # [B, blocks]
    context_lens: torch.Tensor  # [B]
    num_decodes: int
    decodes: dict[int, DecodeItems]  # by window; empty without decodes
    chunk_start: torch.Tensor  # [B - num_decodes + 1]: first row of each chunk, behind the decodes
    max_chunk: int  # query tokens of the longest


def plan_gpu(
    num_kv_heads: int,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    prefills: Sequence[tuple[int, int]],
    windows: Sequence[int],
) -> GpuPlan:
    num_decodes = len(block_table) - len(prefills)
    starts = [0]
    for query_len, _ in prefills:
        starts.append(starts[-1] + query_len)
    return GpuPlan(
        slot_mapping,
        block_table,
        context_lens,
        num_decodes,
        _plan_windows(context_lens[:num_decodes], max_context_len, num_kv_heads, windows),
        to_device(block_table.device, np.array(starts))[0] if prefills else context_lens[:0],
        max((query_len for query_len, _ in prefills), default=0),
    )


def _plan_windows(
    context_lens: torch.Tensor, max_context_len: int, num_kv_heads: int, windows: Sequence[int]
) -> dict[int, DecodeItems]:
    """Windows that no context reaches share the items of none."""
    if not len(context_lens):
        return {}
    reached = {window: window if window < max_context_len else 0 for window in windows}
    plans = {
        window: plan_items(context_lens, max_context_len, num_kv_heads, window)
        for window in dict.fromkeys(reached.values())
    }
    return {window: plans[reached[window]] for window in windows}


def attend(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: GpuPlan,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """query [T, query heads, dim], heads dense → new memory of that shape."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    decodes, chunks = slice(plan.num_decodes), slice(plan.num_decodes, None)
    if plan.decodes:
        attend_decodes(
            query[decodes],
            out[decodes],
            pool,
            layer,
            plan.block_table[decodes],
            plan.context_lens[decodes],
            plan.decodes[window],
            scale,
            softcap,
        )
    if plan.max_chunk and hopper_attention.fits(query, pool, window, softcap):
        hopper_attention.attend_chunks(
            query[chunks],
            out[chunks],
            pool,
            layer,
            plan.block_table[chunks],
            plan.context_lens[chunks],
            plan.chunk_start,
            plan.max_chunk,
            scale,
        )
    elif plan.max_chunk:
        attend_chunks(
            query[chunks],
            out[chunks],
            pool,
            layer,
            plan.block_table[chunks],
            plan.context_lens[chunks],
            plan.chunk_start,
            plan.max_chunk,
            window,
            scale,
            softcap,
        )
    return out
