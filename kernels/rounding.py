"""Rounds float weights to 8 or 4 bits, group by group."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from paceline.kernels.quantized import GROUP, Quantized

_PARTS = 4096  # columns at once: the passes below stay small
_MOST = 65504.0  # of a scale, a 16-bit float
_FINEST = 2.0**-10  # of the highest magnitude: finer steps would need a zero beyond 16 bits

_Rounded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def round_to_8(weight: torch.Tensor) -> Quantized:
    """weight [in, out], finite; symmetric: the scale is the highest magnitude / 127."""
    return _in_parts(weight, 8, _symmetric)


def round_to_4(weight: torch.Tensor) -> Quantized:
    """weight [in, out], finite; from the lowest to the highest of the group in 15 steps."""
    return _in_parts(weight, 4, _from_lowest)


def _in_parts(
    weight: torch.Tensor, bits: int, round_groups: Callable[[torch.Tensor], _Rounded]
) -> Quantized:
    depth, num_columns = weight.shape
    num_groups = -(-depth // GROUP)
    numbers = torch.empty(num_groups * GROUP, num_columns, dtype=torch.uint8)
    scales = torch.empty(num_groups, num_columns, dtype=torch.float16)
    zeros: torch.Tensor | None = None
    for first in range(0, num_columns, _PARTS):
        part = slice(first, min(first + _PARTS, num_columns))
        groups = F.pad(weight[:, part].float().cpu(), (0, 0, 0, -depth % GROUP))
        found, scales[:, part], offsets = round_groups(groups.view(num_groups, GROUP, -1))
        numbers[:, part] = found.flatten(0, 1)
        if offsets is not None:
            zeros = torch.empty_like(scales) if zeros is None else zeros
            zeros[:, part] = offsets
    return Quantized(bits, depth, numbers, scales, zeros)


def _symmetric(groups: torch.Tensor) -> _Rounded:
    """groups [n, GROUP, out]. The scale is rounded first, then the numbers fit it."""
    scales = _to_half(groups.abs().amax(dim=1) / 127, 127)
    numbers = (groups / _divisor(scales)).round_().clamp_(-127, 127).add_(128)
    return numbers.byte(), scales, None


def _from_lowest(groups: torch.Tensor) -> _Rounded:
    lowest, highest = groups.aminmax(dim=1)
    least = torch.maximum(lowest.abs(), highest.abs()) * _FINEST
    scales = _to_half(torch.maximum((highest - lowest) / 15, least), 15)
    divisor = _divisor(scales)
    zeros = (-lowest / divisor[:, 0]).half()
    numbers = (groups / divisor).add_(zeros.float()[:, None]).round_().clamp_(0, 15)
    return numbers.byte(), scales, zeros


def _to_half(needed: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Scales in 16 bits. Below 2**-14 these lie far apart: one that has come out too small for the
    last of its steps, by more than half of it, is taken up."""
    scales = needed.clamp(max=_MOST).half()
    short = (needed > scales.float() * (1 + 0.5 / num_steps)) & (needed < _MOST)
    return torch.where(short, (scales.view(torch.int16) + 1).view(torch.float16), scales)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """[n, out] → [n, 1, out]; where all of a group is zero, any will do."""
    wide = scales.float()[:, None]
    return torch.where(wide > 0, wide, 1)
