"""Numbers of 16 bits as float32, without a change of value: logits before they are sampled."""

import torch

from paceline.kernels import backend


def widened(x: torch.Tensor) -> torch.Tensor:
    """Any shape → float32; `x` itself where it is that already."""
    if x.dtype != torch.float32 and x.is_contiguous() and backend.uses_triton(x):
        from paceline.kernels.gpu import widen as gpu

        return gpu.widened(x)
    return x.float()
