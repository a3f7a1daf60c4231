"""A pure decode step of few rows on a CUDA device, with layers of the common shape.

Between the products of a layer stands one launch, or attention: a product leaves parts, and what
reads it next adds them up.

    norm → qkv │ parts → heads, KV → attention → out │ parts + residual, norm → gate and up, gated
         → down │ parts + residual, norm of the next layer → …
"""

from collections.abc import Sequence

import torch

from paceline.kernels import backend
from paceline.kernels.attention import AttentionPlan, paged_attention
from paceline.kernels.gate import COMPILED
from paceline.kernels.product import TorchMatrix
from paceline.models.base import ForwardBatch
from paceline.models.decode_program import LayerParts
from paceline.models.layers import Linear
from paceline.models.norms import Norm, RMSNorm

_HALVES = (torch.bfloat16, torch.float16)
_ALIGNED = 8  # numbers: the copy engine takes rows of multiples of 16 bytes


class FusedDecode:
    def __init__(
        self,
        parts: Sequence[LayerParts],
        places: Sequence[tuple[int, int]],
        norm: RMSNorm,
        head: Linear,
        head_dim: int,
    ) -> None:
        """`places`: of each layer, its page group and its index in a page; `norm`: the last one."""
        self._parts = parts
        self._places = places
        self._head = head
        self._head_dim = head_dim
        self._norms = [layer.norm_1 for layer in parts[1:]] + [norm]

    def fits(self, batch: ForwardBatch) -> bool:
        """Beyond, torch's products are as fast."""
        from paceline.kernels.gpu.skinny_product import MAX_ROWS

        is_decode = not batch.prefills and batch.wants_last_rows
        return is_decode and len(batch.token_ids) <= MAX_ROWS

    def logits(
        self,
        hidden: torch.Tensor,
        pool: torch.Tensor,
        plans: Sequence[AttentionPlan],
        tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """hidden [T, hidden], which is overwritten → [T, vocab] float32, rounded like products."""
        from paceline.kernels.gpu import kv_write, skinny_product
        from paceline.kernels.gpu.rmsnorm import add_parts_rms_norm

        normed = self._parts[0].norm_1(hidden)
        for layer, (group, index), norm in zip(self._parts, self._places, self._norms, strict=True):
            plan, attention = plans[group], layer.attention
            assert plan.gpu is not None
            qkv = skinny_product.parts(normed, _weight(layer.qkv))
            rotation = None if layer.rope_index is None else tables[layer.rope_index]
            query = kv_write.write_kv_parts(
                qkv.view(*qkv.shape[:2], -1, self._head_dim),
                pool,
                index,
                plan.gpu.slot_mapping,
                rotation,
                layer.head_scale,
            )
            attended = paged_attention(
                query, pool, index, plan, attention.scale, attention.window, attention.softcap
            )
            out = skinny_product.parts(attended.flatten(1), _weight(layer.out))
            normed = add_parts_rms_norm(hidden, out, layer.norm_2.weight, layer.norm_2.epsilon)
            inner = skinny_product.gated(normed, _weight(layer.gate_up), COMPILED[layer.act])
            down = skinny_product.parts(inner, _weight(layer.down))
            normed = add_parts_rms_norm(hidden, down, norm.weight, norm.epsilon)
        return skinny_product.rounded(normed, _weight(self._head))


def fused_decode(
    parts: Sequence[LayerParts | None],
    places: Sequence[tuple[int, int]],
    norm: Norm,
    head: Linear,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> FusedDecode | None:
    """None where a layer is of another shape, or the device has no such kernels."""
    whole = [layer for layer in parts if layer is not None and _is_fusible(layer)]
    is_common = len(whole) == len(parts) and isinstance(norm, RMSNorm) and _is_plain(head)
    if not is_common or dtype not in _HALVES or not backend.is_hopper(device):
        return None
    assert isinstance(norm, RMSNorm)
    return FusedDecode(whole, places, norm, head, head_dim)


def _is_fusible(layer: LayerParts) -> bool:
    linears = (layer.qkv, layer.out, layer.gate_up, layer.down)
    return layer.act in COMPILED and all(map(_is_plain, linears))


def _is_plain(linear: Linear) -> bool:
    """Whether it is a plain product that the copy engine can read."""
    matrix = linear.matrix
    if not isinstance(matrix, TorchMatrix) or linear.bias is not None:
        return False
    weight = matrix.weight
    return weight.is_contiguous() and not any(size % _ALIGNED for size in weight.shape)


def _weight(linear: Linear) -> torch.Tensor:
    matrix = linear.matrix
    assert isinstance(matrix, TorchMatrix)
    return matrix.weight
