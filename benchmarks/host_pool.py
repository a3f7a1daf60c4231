"""The page pool of an engine in process, as that of a worker's rank."""

import os

from paceline.kv_transfer.huge_pool import HugePages
from paceline.kv_transfer.pool_memory import new_pool_file
from paceline.models.base import Model
from paceline.worker.rank_pool import RankPool, make_pool


def host_pool(model: Model, num_bytes: int) -> RankPool:
    """Waits until it lies on huge pages, as a worker's does some seconds after its start."""
    fd = new_pool_file()
    try:
        pool = make_pool(model, fd, num_bytes, "cpu")
    finally:
        os.close(fd)
    assert pool.memory is not None
    huge_pages = HugePages(pool.memory)
    huge_pages.start()
    huge_pages.wait()
    return pool
