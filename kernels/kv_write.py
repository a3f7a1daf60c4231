"""From the product qkv to attention: norms of heads, rotation, K and V into the pool.

One kernel on a CUDA device; elsewhere kernels/rmsnorm.py, rope.py and attention.py, in turn.
"""

from dataclasses import dataclass

import torch

from paceline.kernels.attention import AttentionPlan, write_kv
from paceline.kernels.rmsnorm import rms_norm
from paceline.kernels.rope import rotate_


@dataclass(frozen=True, slots=True)
class HeadScale:
    """An RMS norm of each query head and each key head."""

    weight: torch.Tensor  # [query and key heads, dim]
    epsilon: float


def prepare_heads(
    qkv: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    tables: tuple[torch.Tensor, torch.Tensor] | None,
    norm: HeadScale | None,
) -> torch.Tensor:
    """qkv [T, query, key and value heads, dim] → queries [T, query heads, dim]; may change qkv.

    `tables`: of kernels/rope.py; None: no rotation.
    """
    if plan.gpu is not None:
        from paceline.kernels.gpu import kv_write

        return kv_write.write_kv(qkv, pool, layer, plan.gpu.slot_mapping, tables, norm)
    num_rotated = qkv.shape[1] - plan.group.num_heads
    num_heads = num_rotated - plan.group.num_heads
    if norm is not None:
        heads = qkv[:, :num_rotated]
        heads.copy_(rms_norm(heads, norm.weight, norm.epsilon))
    if tables is not None:
        cos, sin = tables
        rotate_(qkv[:, :num_rotated, : cos.shape[-1]], cos, sin)
    write_kv(pool, layer, qkv[:, num_heads:], plan)
    return qkv[:, :num_heads]
