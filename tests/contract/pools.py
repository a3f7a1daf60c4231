"""Pools with known contents for both ends of a link."""

import numpy as np
from numpy.typing import NDArray

from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer.base import LocalPool, PageIds
from paceline.kv_transfer.pool_memory import new_pool_file, size_pool_memory

SMALL = PageGroup("full", num_layers=2, num_heads=3, head_dim=8)
LARGE = PageGroup("full", num_layers=30, num_heads=3, head_dim=64)  # 720 KiB a page


def make_pool(group: PageGroup, num_pages: int, seed: int | None = None) -> LocalPool:
    """Random bytes, or all ones (NaN in every format)."""
    memory = size_pool_memory(new_pool_file(), num_pages * group.page_bytes)
    pool = LocalPool(memory.view, group, num_pages, memory.fd)
    if seed is None:
        pages_of(pool)[:] = 0xFF
    else:
        random = np.random.default_rng(seed).bytes(len(pool.memory))
        pool.memory[:] = random
    return pool


def pages_of(pool: LocalPool) -> NDArray[np.uint8]:
    """[pages, page bytes], writable."""
    return np.frombuffer(pool.memory, np.uint8).reshape(pool.num_pages, -1)


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int64)
