"""The rank's page pool: sized and sealed in the descriptor that the front has made."""

import errno
import fcntl
import mmap
import os

import torch

from paceline.core.errors import ConfigError
from paceline.engine.pools import allocate_pools, view_pool
from paceline.kv_transfer.pool_memory import open_pool_memory
from paceline.models.base import Model

_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14; not in Python 3.11


def make_pools(
    model: Model, fd: int, pool_bytes: int, device: str
) -> tuple[tuple[torch.Tensor, ...], memoryview | None]:
    """Pools of whole pages in at most `pool_bytes`, and their memory when others can map it."""
    group = model.layout.groups[0]
    num_pages = pool_bytes // group.page_bytes
    if num_pages < 2:
        reason = f"holds {num_pages} pages of {group.page_bytes} bytes"
        raise ConfigError("pool_mib", pool_bytes >> 20, reason)
    if device != "cpu":
        return allocate_pools(model.layout, num_pages, device), None
    memory = size_pool(fd, num_pages * group.page_bytes)
    return (view_pool(memory, group),), memory


def size_pool(fd: int, num_bytes: int) -> memoryview:
    """Raises ConfigError when the machine has not enough memory."""
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    view = open_pool_memory(fd).view
    mapping = view.obj
    assert isinstance(mapping, mmap.mmap)
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # that: an older kernel, pages come with their first use
            reason = f"memory for the page pool cannot be had: {os.strerror(error.errno or 0)}"
            raise ConfigError("pool_mib", num_bytes >> 20, reason) from None
    return view
