"""The rank's page pool: sized and sealed in the descriptor that the front has made."""

import torch

from paceline.core.errors import ConfigError
from paceline.engine.pools import allocate_pools, view_pool
from paceline.kv_transfer.pool_memory import size_pool_memory
from paceline.models.base import Model


def make_pools(
    model: Model, fd: int, pool_bytes: int, device: str
) -> tuple[tuple[torch.Tensor, ...], memoryview | None]:
    """Pools of whole pages in at most `pool_bytes`, and their memory when others can map it."""
    group = model.layout.page
    num_pages = pool_bytes // group.page_bytes
    if num_pages < 2 * len(model.layout.groups):
        reason = f"holds {num_pages} pages of {group.page_bytes} bytes"
        raise ConfigError("pool_mib", pool_bytes >> 20, reason)
    if device != "cpu":
        _check_free(num_pages * group.page_bytes, device)
        return allocate_pools(model.layout, num_pages, device), None
    memory = size_pool_memory(fd, num_pages * group.page_bytes).view
    return (view_pool(memory, group),), memory


def _check_free(num_bytes: int, device: str) -> None:
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes > free:
        reason = f"memory for the page pool cannot be had: {free >> 20} MiB of {device} are free"
        raise ConfigError("pool_mib", num_bytes >> 20, reason)
