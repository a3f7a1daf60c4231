"""The rank's page pool: in the descriptor that the front has made, or on the rank's device."""

from dataclasses import dataclass, replace

import structlog
import torch

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVLayout
from paceline.engine.canary import Canary, num_canary_pages
from paceline.engine.pools import view_bytes, view_pool
from paceline.kv_transfer.cuda_driver import OUT_OF_MEMORY, DriverError
from paceline.kv_transfer.cuda_memory import new_device_memory
from paceline.kv_transfer.pool_memory import size_pool_memory
from paceline.models.base import Model
from paceline.worker.device_room import fitting_mib, free_mib

_log = structlog.get_logger("paceline.rank")


@dataclass(frozen=True, slots=True)
class RankPool:
    """A tensor a rank for all page groups, and their bytes, rank after rank: a memoryview when
    others can map it on the CPU, `device_bytes` on a device, with a descriptor when it can be
    exported, else -1. Behind the pages of requests, which are `tensors`, come the canary's."""

    tensors: tuple[torch.Tensor, ...]
    canary: Canary
    memory: memoryview | None = None
    device_bytes: torch.Tensor | None = None
    device_fd: int = -1


def make_pool(model: Model, fd: int, pool_bytes: int, device: str) -> RankPool:
    """Whole pages in at most `pool_bytes`, and the canary's. Raises ConfigError when they cannot
    be had."""
    group = model.layout.page
    num_ranks = len(model.layout.ranks)
    num_pages = pool_bytes // model.layout.page_bytes
    if num_pages < 2 * len(model.layout.groups):
        reason = f"holds {num_pages} pages of {model.layout.page_bytes} bytes"
        raise ConfigError("pool_mib", pool_bytes >> 20, reason)
    num_all = num_pages + num_canary_pages(model.layout)
    num_bytes = num_ranks * num_all * group.page_bytes
    if device == "cpu":
        memory = size_pool_memory(fd, num_bytes).view
        return _cut(model.layout, view_pool(memory, group), num_pages, memory)
    ConfigError.check("num_ranks", num_ranks, num_ranks == 1, "must be 1 on a device")
    values, device_fd = _on_device(num_bytes, torch.device(device))
    whole = view_bytes(values[:num_bytes], group)
    made = _cut(model.layout, whole, num_pages)
    return replace(made, device_bytes=values, device_fd=device_fd)


def _cut(
    layout: KVLayout, whole: torch.Tensor, num_pages: int, memory: memoryview | None = None
) -> RankPool:
    pools = torch.split(whole, len(whole) // len(layout.ranks))
    return RankPool(tuple(pool[:num_pages] for pool in pools), Canary(layout, pools), memory)


def _on_device(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Memory that the driver exports; torch's own where it cannot, which no reader can map."""
    try:
        memory = new_device_memory(num_bytes, device)
        return memory.bytes, memory.fd
    except DriverError as error:
        if error.code == OUT_OF_MEMORY:
            raise _too_large(num_bytes, device) from None
        _log.warning("the page pool cannot be exported", device=str(device), reason=str(error))
        _check_free(num_bytes, device)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device), -1


def _check_free(num_bytes: int, device: torch.device) -> None:
    if num_bytes > torch.cuda.mem_get_info(device)[0]:
        raise _too_large(num_bytes, device)


def _too_large(num_bytes: int, device: torch.device) -> ConfigError:
    free, fitting = free_mib(device), fitting_mib(device)
    reason = (
        f"memory for the page pool cannot be had: {free} MiB of {device} are free; "
        f"set it to {fitting} at most, which leaves room for steps"
    )
    return ConfigError("pool_mib", num_bytes >> 20, reason)
