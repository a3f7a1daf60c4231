"""Float weights that are rounded to 8 or 4 bits while they load."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.kernels.product import Matrix
from paceline.kernels.quantized import Quantized, hold_quantized
from paceline.kernels.rounding import round_to_4, round_to_8
from paceline.models.quantization import PLAIN, Part, Stored
from paceline.models.weights import WeightReader

Rounding = Callable[[torch.Tensor], Quantized]


@dataclass(frozen=True, slots=True)
class Rounded:
    semantics: object
    layer: Rounding
    rounds_tables: bool = True

    def read(
        self, reader: WeightReader, names: Sequence[str], num_in: int, num_out: Sequence[int]
    ) -> Stored | None:
        return None

    def hold(self, weight: torch.Tensor, part: Part) -> Matrix:
        if part is Part.ROUTER:  # small, and a wrong expert costs more than a rounded one
            return PLAIN.hold(weight, part)
        # 4 bits of the vocabulary show in every choice between tokens: 8 for it always.
        rounded = round_to_8(weight) if part is Part.VOCABULARY else self.layer(weight)
        return hold_quantized(rounded, weight.dtype, weight.device)


def int8() -> Rounded:
    return Rounded(("int8", 1), round_to_8)


def int4() -> Rounded:
    return Rounded(("int4", 1), round_to_4)
