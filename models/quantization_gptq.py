"""GPTQ checkpoints: qweight, qzeros, scales and g_idx of each layer, 4 or 8 bits.

qweight [in · bits / 32, out]       words of numbers that follow each other along the input
qzeros  [groups, out · bits / 32]   along the output; "gptq" stores them less 1, "gptq_v2" not
scales  [groups, out]
g_idx   [in]                        group of each input; the plain order where it is left out
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.errors import ConfigError
from paceline.kernels.product import Matrix
from paceline.models.fields import Fields
from paceline.models.quantization import PLAIN, Part
from paceline.models.quantization_stored import (
    Grouped,
    StoredLayer,
    read_group_size,
    side_by_side,
    unpack,
    warn_of_unread,
)
from paceline.models.weights import WeightReader

BITS = (4, 8)
FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class Gptq:
    bits: int
    group_size: int  # 0: the whole input
    zeros_less_1: bool
    rounds_tables: bool = False

    @property
    def semantics(self) -> object:
        return ("gptq", 1, self.bits, self.group_size, self.zeros_less_1)

    def read(
        self, reader: WeightReader, names: Sequence[str], num_in: int, num_out: Sequence[int]
    ) -> StoredLayer | None:
        if not reader.has_all(names, "qweight"):
            return None
        group_size = self.group_size or -(-num_in // 32) * 32
        layers = [
            self._layer(reader, name, group_size, (num_in, size))
            for name, size in zip(names, num_out, strict=True)
        ]
        order = _common_order(reader, names, group_size, num_in)
        joined = side_by_side(layers)
        if order is not None:
            joined = Grouped(joined.numbers[order], joined.scales, joined.zeros)
        return StoredLayer(joined.quantized(self.bits, group_size), order)

    def hold(self, weight: torch.Tensor, part: Part) -> Matrix:
        return PLAIN.hold(weight, part)

    def _layer(
        self, reader: WeightReader, name: str, group_size: int, shape: tuple[int, int]
    ) -> Grouped:
        num_in, num_out = shape
        per_word, num_groups = 32 // self.bits, -(-num_in // group_size)
        for size in shape:
            if size % per_word:
                reason = f"{size} is not a multiple of {per_word}, the numbers in a word"
                raise ConfigError("weights", f"{name}.qweight", reason)
        words = reader.integers(f"{name}.qweight", (num_in // per_word, num_out))
        zero_words = reader.integers(f"{name}.qzeros", (num_groups, num_out // per_word))
        zeros = unpack(zero_words, self.bits, 1, range(per_word))
        if self.zeros_less_1:
            zeros = (zeros + 1) & ((1 << self.bits) - 1)
        return Grouped(
            unpack(words, self.bits, 0, range(per_word)),
            reader.floats(f"{name}.scales", (num_groups, num_out)),
            zeros,
        )


def read_config(fields: Fields) -> Gptq:
    """Whether zeros are in the middle and inputs in order (sym, desc_act), tensors tell."""
    bits = fields.integer("bits")
    if bits not in BITS:
        raise fields.error("bits", bits, f"must be one of {', '.join(map(str, BITS))}")
    form = fields.choice("checkpoint_format", FORMATS, "gptq")
    fields.choice("pack_dtype", ["int32"], "int32")
    if fields.flag("is_marlin_format", False):
        raise fields.error("is_marlin_format", True, "is not supported")
    if dynamic := fields.get("dynamic"):
        raise fields.error("dynamic", dynamic, "settings of single layers are not supported")
    group_size = read_group_size(fields)
    warn_of_unread(fields)
    return Gptq(bits, group_size, form == "gptq")


def _common_order(
    reader: WeightReader, names: Sequence[str], group_size: int, num_in: int
) -> torch.Tensor | None:
    """Of layers with the same input: GPTQ sorts by the input, so that they agree."""
    first, *others = [_order(reader, name, group_size, num_in) for name in names]
    for name, other in zip(names[1:], others, strict=True):
        agrees = other is first if other is None or first is None else torch.equal(other, first)
        if not agrees:
            reason = f"differs from that of {names[0]}, which has the same input"
            raise ConfigError("weights", f"{name}.g_idx", reason)
    return first


def _order(reader: WeightReader, name: str, group_size: int, num_in: int) -> torch.Tensor | None:
    """Inputs sorted by group; None where they are already."""
    if f"{name}.g_idx" not in reader:
        return None
    groups = reader.integers(f"{name}.g_idx", (num_in,))
    plain = torch.arange(num_in, dtype=groups.dtype) // group_size
    if torch.equal(groups, plain):
        return None
    found, order = torch.sort(groups, stable=True)
    if not torch.equal(found, plain):
        reason = f"must name each group {group_size} times"
        raise ConfigError("weights", f"{name}.g_idx", reason)
    return order
