"""Attention on the CPU in float32 by compiled code, which reads the pool where its pages lie.

kernels/attention.py decides whether a step runs here, and has the torch path and the definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.kv_layout import PageGroup
from paceline.kernels import native

_MAX_HEAD_DIM = 256  # numbers; a multiple of 8


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """The sequences of a step, as arrays of int64."""

    slot_mapping: NDArray[np.int64]  # [T]
    query_start: NDArray[np.int64]  # [B + 1]
    context_lens: NDArray[np.int64]  # [B]
    block_table: NDArray[np.int64]  # [B, blocks]


def fits_compiled(head_dim: int) -> bool:
    return native.module is not None and head_dim <= _MAX_HEAD_DIM and head_dim % 8 == 0


def plan_paged(
    group: PageGroup,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    prefills: Sequence[tuple[int, int]],
    dtype: torch.dtype,
) -> PagedPlan | None:
    """None where the compiled code has no part."""
    on_cpu = block_table.device.type == "cpu" and dtype == torch.float32
    if not on_cpu or not fits_compiled(group.head_dim):
        return None
    num_decodes = len(block_table) - len(prefills)
    lengths = [1] * num_decodes + [query_len for query_len, _ in prefills]
    query_start = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=query_start[1:])
    slots, table, lens = (
        tensor.contiguous().numpy() for tensor in (slot_mapping, block_table, context_lens)
    )
    return PagedPlan(slots, query_start, lens, table)


def write_paged(pool: torch.Tensor, layer: int, kv: torch.Tensor, plan: PagedPlan) -> None:
    """As write_kv. Raises IndexError for a slot outside the pool, before anything is written."""
    assert native.module is not None
    num_tokens, num_cells, dim = kv.shape
    if kv.stride()[1:] != (dim, 1):
        kv = kv.contiguous()
    native.module.write_kv(
        native.flat(kv),
        pool.numpy(),
        plan.slot_mapping,
        kv.stride(0) if num_tokens > 1 else num_cells * dim,
        num_cells,
        dim,
        pool.shape[1],
        layer,
        torch.get_num_threads(),
    )


def attend_paged(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: PagedPlan,
    scale: float,
    window: int,
    softcap: float,
    level: int | None = None,
) -> torch.Tensor:
    """As paged_attention. `level` of instructions: the best where it is not given."""
    assert native.module is not None
    num_rows, num_heads, dim = query.shape
    if query.stride()[1:] != (dim, 1):
        query = query.contiguous()
    row_stride = query.stride(0) if num_rows > 1 else num_heads * dim
    out = query.new_empty(num_rows, num_heads, dim)
    native.module.attend(
        native.flat(query),
        out.numpy(),
        pool.numpy(),
        plan.query_start,
        plan.context_lens,
        plan.block_table,
        row_stride,
        num_heads,
        pool.shape[3],
        dim,
        pool.shape[1],
        layer,
        window,
        scale,
        softcap,
        torch.get_num_threads(),
        native.module.BEST_LEVEL if level is None else level,
    )
    return out
