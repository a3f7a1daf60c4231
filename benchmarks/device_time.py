"""Time on a CUDA device, as its own clock has it."""

from collections.abc import Callable

import torch


def device_seconds(call: Callable[[], object]) -> float:
    """Between two events around what `call` launches."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1000
