"""What checkpoints of integers have in common: groups along the input, zeros between them.

weight[k, c] = scales[group of k, c] · (number[k, c] - zeros[group of k, c])
"""

from dataclasses import dataclass

import structlog
import torch
from torch.nn import functional as F

from paceline.kernels.quantized import GROUP, Quantized
from paceline.models.fields import Fields

log = structlog.get_logger()

# How a checkpoint came about, or what its tensors tell.
_HARMLESS_NAMES = """
    act_group_aware batch_size cache_block_outputs cache_examples_on_gpu damp_auto_increment
    damp_percent dataset desc_act disable_exllama exllama_config fuse_max_seq_len do_fuse
    hyb_act lm_head max_input_length meta model_file_base_name model_name_or_path
    module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse
    modules_to_not_convert pack_impl pad_token_id static_groups sym tokenizer true_sequential
    use_cuda_fp16 use_exllama
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())


@dataclass(frozen=True, slots=True)
class StoredLayer:
    weight: Quantized
    order: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Grouped:
    """Unpacked numbers of a layer, or of several side by side."""

    numbers: torch.Tensor  # uint8 [in, out]
    scales: torch.Tensor  # float [groups, out]
    zeros: torch.Tensor  # uint8 [groups, out]

    def quantized(self, bits: int, group_size: int) -> Quantized:
        """In our groups. Zeros that are all in the middle need no memory."""
        depth = len(self.numbers)
        num_groups = -(-depth // GROUP)
        is_symmetric = bool((self.zeros == 1 << (bits - 1)).all())

        def spread(rows: torch.Tensor) -> torch.Tensor:
            return rows.half().repeat_interleave(group_size // GROUP, dim=0)[:num_groups]

        return Quantized(
            bits=bits,
            depth=depth,
            numbers=F.pad(self.numbers, (0, 0, 0, -depth % GROUP)),
            scales=spread(self.scales),
            zeros=None if is_symmetric else spread(self.zeros),
        )


def side_by_side(layers: list[Grouped]) -> Grouped:
    return Grouped(
        torch.cat([layer.numbers for layer in layers], dim=1),
        torch.cat([layer.scales for layer in layers], dim=1),
        torch.cat([layer.zeros for layer in layers], dim=1),
    )


def unpack(
    words: torch.Tensor, bits: int, dim: int, order: range | tuple[int, ...]
) -> torch.Tensor:
    """int32 words → uint8 numbers, more along `dim`; the lowest bits of a word hold order[0]."""
    per_word = 32 // bits
    shape = list(words.shape)
    shape[dim] *= per_word
    numbers = torch.empty(shape, dtype=torch.uint8)
    for i, place in enumerate(order):
        part = words >> (bits * i) & ((1 << bits) - 1)
        target = numbers[place::per_word] if dim == 0 else numbers[:, place::per_word]
        target.copy_(part)
    return numbers


def read_group_size(fields: Fields) -> int:
    """0: one group for the whole input."""
    size = fields.integer("group_size", minimum=-1)
    if size == -1:
        return 0
    if size % GROUP or size < GROUP:
        raise fields.error("group_size", size, f"must be -1 or a multiple of {GROUP}")
    return int(size)


def warn_of_unread(fields: Fields) -> None:
    for name, value in fields.unread().items():
        if name not in _HARMLESS:
            log.warning(
                "unknown field of quantization_config has no effect", field=name, value=value
            )
