"""AWQ checkpoints, version "gemm": qweight, qzeros and scales of each layer, 4 bits.

qweight [in, out / 8]       words of eight numbers along the output, in the order ORDER
qzeros  [groups, out / 8]   the same
scales  [groups, out]
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

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of a word, from its lowest bits


@dataclass(frozen=True, slots=True)
class Awq:
    group_size: int  # 0: the whole input
    rounds_tables: bool = False

    @property
    def semantics(self) -> object:
        return ("awq", 1, self.group_size)

    def read(
        self, reader: WeightReader, names: Sequence[str], num_in: int, num_out: Sequence[int]
    ) -> StoredLayer | None:
        if not reader.has_all(names, "qweight"):
            return None
        group_size = self.group_size or -(-num_in // 32) * 32
        layers = [
            _layer(reader, name, (num_in, size), -(-num_in // group_size))
            for name, size in zip(names, num_out, strict=True)
        ]
        return StoredLayer(side_by_side(layers).quantized(BITS, group_size))

    def hold(self, weight: torch.Tensor, part: Part) -> Matrix:
        return PLAIN.hold(weight, part)


def read_config(fields: Fields) -> Awq:
    bits = fields.integer("bits")
    if bits != BITS:
        raise fields.error("bits", bits, f"must be {BITS}")
    version = fields.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise fields.error("version", version, "not supported; known: gemm")
    fields.choice("checkpoint_format", ["gemm"], "gemm")
    fields.choice("backend", ["autoawq"], "autoawq")
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", False, "is not supported")
    group_size = read_group_size(fields)
    warn_of_unread(fields)
    return Awq(group_size)


def _layer(reader: WeightReader, name: str, shape: tuple[int, int], num_groups: int) -> Grouped:
    num_in, num_out = shape
    if num_out % len(ORDER):
        reason = f"{num_out} is not a multiple of {len(ORDER)}, the numbers in a word"
        raise ConfigError("weights", f"{name}.qweight", reason)
    words = reader.integers(f"{name}.qweight", (num_in, num_out // len(ORDER)))
    zero_words = reader.integers(f"{name}.qzeros", (num_groups, num_out // len(ORDER)))
    return Grouped(
        unpack(words, BITS, 1, ORDER),
        reader.floats(f"{name}.scales", (num_groups, num_out)),
        unpack(zero_words, BITS, 1, ORDER),
    )
