"""What launches need to know of the device."""

import functools

import torch

_INTERPRETED_PROCESSORS = 2  # enough for a test to see work shared out


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(size: int, least: int = 16) -> int:
    """The next one, from `least` on: blocks have such sizes, products none below 16."""
    return max(least, 1 << (size - 1).bit_length())
