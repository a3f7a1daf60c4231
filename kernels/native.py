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
    on_cpu = tensor.device.type == "cpu" and tensor.dtype == torch.float32
    return module is not None and on_cpu


def flat(tensor: torch.Tensor) -> NDArray[Any]:
    """All that lies from the first to the last number of a tensor with gaps between its rows."""
    ends = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    array: NDArray[Any] = tensor.as_strided((sum(ends) + 1,), (1,)).numpy()
    return array
