"""The stream on which a rank computes: of higher priority than copies of KV beside it.

Multiprocessors that come free go to waiting kernels of the highest priority, so a copy gets what a
step leaves idle. A captured graph has the priority of the stream on which it was captured.
"""

import functools

import torch

_HIGH = -1  # torch's own streams have 0, the lowest


def use_compute_stream(device: torch.device) -> None:
    """Makes it the current stream of this thread. All threads that compute share one, so that what
    they launch runs in order. Nothing to do on the CPU."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_stream(_stream(index))  # of that device, which becomes the current one


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index, _HIGH)  # type: ignore[no-untyped-call]
