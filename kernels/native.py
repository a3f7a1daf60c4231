"""Whether compiled code may do an operation, and the arrays that it takes."""

from types import ModuleType
from typing import Any

import torch
from numpy.typing import NDArray

module: ModuleType | None
try:
    from paceline.kernels import _native

    module = _native
except ImportError:  # a source tree without a compiler still works, slower
    module = None


def takes(tensor: torch.Tensor) -> bool:
    """Compiled code works in float32 on the CPU."""
    return tensor.is_cpu and tensor.dtype is torch.float32 and module is not None


def flat(tensor: torch.Tensor) -> NDArray[Any]:
    """All that lies from the first to the last number of a tensor with gaps between its rows."""
    if tensor.is_contiguous():  # one row always is
        array: NDArray[Any] = tensor.numpy()
        return array
    ends = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    array = tensor.as_strided((sum(ends) + 1,), (1,)).numpy()
    return array
