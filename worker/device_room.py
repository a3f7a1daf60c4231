"""What to set otherwise where a device has too little memory for what a worker was told."""

import contextlib
from collections.abc import Iterator

import torch

from paceline.core.errors import ConfigError

_FOR_STEPS = 8  # one part in so many of what is free is left for what steps need


def free_mib(device: torch.device) -> int:
    torch.cuda.empty_cache()  # else what torch keeps for itself counts as taken
    return int(torch.cuda.mem_get_info(device)[0]) >> 20


def fitting_mib(device: torch.device) -> int:
    """Of a pool that leaves room for steps."""
    free = free_mib(device)
    return free - free // _FOR_STEPS


@contextlib.contextmanager
def room_for(what: str, field: str, value: object, device: str, advice: str) -> Iterator[None]:
    """Turns a want of memory into ConfigError of `field`, which says how to go on: `advice`."""
    try:
        yield
    except torch.OutOfMemoryError:
        free = free_mib(torch.device(device))
        reason = f"{what} need more than the {free} MiB of {device} that are free; {advice}"
        raise ConfigError(field, value, reason) from None
