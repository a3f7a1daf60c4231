"""Small arrays between host and device, without waiting for what the device still computes.

Memory that is not pinned would make each copy wait for all launches before it, and a step that is
prepared while another runs must not. On the CPU nothing is copied.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.kernels import backend

_ALIGNMENT = 16  # bytes: what kernels are compiled for
_TYPES = {"l": torch.int64, "f": torch.float32, "B": torch.uint8}


def to_device(device: torch.device, *arrays: NDArray[Any]) -> tuple[torch.Tensor, ...]:
    """All in one copy: each costs some 10 µs. On the CPU they share the memory of `arrays`."""
    if device.type == "cpu":
        return tuple(map(torch.from_numpy, arrays))
    staged, lengths = _staged(arrays)
    parts = staged.to(device, non_blocking=True).split(lengths)[::2]  # type: ignore[no-untyped-call]
    return _shaped(parts, arrays)


def to_kernels(*arrays: NDArray[Any]) -> tuple[torch.Tensor, ...]:
    """For a few of Triton's kernels, which read them over the bus: in memory of the host, which
    must be kept until they have run."""
    staged, lengths = _staged(arrays)
    return _shaped(staged.split(lengths)[::2], arrays)  # type: ignore[no-untyped-call]


def _staged(arrays: tuple[NDArray[Any], ...]) -> tuple[torch.Tensor, list[int]]:
    """All in one piece of pinned memory, and the lengths of each and of the gap behind it."""
    sizes = [array.nbytes for array in arrays]
    paddings = [-size % _ALIGNMENT for size in sizes]
    staged = torch.empty(sum(sizes) + sum(paddings), dtype=torch.uint8, pin_memory=True)
    place, start = staged.numpy(), 0
    for array, size, padding in zip(arrays, sizes, paddings, strict=True):
        place[start : start + size] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += size + padding
    return staged, [length for pair in zip(sizes, paddings, strict=True) for length in pair]


def _shaped(
    parts: tuple[torch.Tensor, ...], arrays: tuple[NDArray[Any], ...]
) -> tuple[torch.Tensor, ...]:
    return tuple(
        part.view(_TYPES[array.dtype.char]).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    )


def draws_to_host(token_ids: torch.Tensor, best: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both [S], as `to_host` would copy them, by one launch where Triton computes."""
    if backend.uses_triton(token_ids):
        from paceline.kernels.gpu.transfer import draws_to_host as launch

        return launch(token_ids, best)
    return to_host(token_ids), to_host(best)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """A copy that may be read once an event has passed that is recorded behind it."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
