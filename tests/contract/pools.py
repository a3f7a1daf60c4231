"""Pools with known contents for both ends of a link, in host memory or on a CUDA device."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from paceline.core.kv_layout import PageGroup
from paceline.kernels.pages import sum_pages
from paceline.kv_transfer.base import CellSums, DevicePool, LocalPool, PageIds, Pool
from paceline.kv_transfer.pool_memory import new_pool_file, size_pool_memory

SMALL = PageGroup("full", num_layers=2, num_heads=3, head_dim=8)
LARGE = PageGroup("full", num_layers=30, num_heads=3, head_dim=64)  # 720 KiB a page


ACROSS = "cuda_ipc_across"  # cuda_ipc, from one device to another


def make_pool(
    group: PageGroup, num_pages: int, seed: int | None = None, transport: str = "shm"
) -> Pool:
    """Random bytes as a source has them, or all ones (NaN in every format) for a reader, where the
    transport wants them."""
    memory = size_pool_memory(new_pool_file(), num_pages * group.page_bytes)
    pool = LocalPool(memory.view, group, num_pages, memory.fd)
    if seed is None:
        pages_of(pool)[:] = 0xFF
    else:
        random = np.random.default_rng(seed).bytes(len(pool.memory))
        pool.memory[:] = random
    if transport not in ("cuda_ipc", ACROSS):
        return pool
    return on_device(pool, "cuda:1" if transport == ACROSS and seed is None else "cuda:0")


def on_device(pool: LocalPool, device: str) -> DevicePool:
    """A copy."""
    import torch  # only here: a process that has no such pool starts without it

    from paceline.kv_transfer.cuda_memory import new_device_memory

    memory = new_device_memory(len(pool.memory), torch.device(device))
    memory.bytes[: len(pool.memory)] = torch.frombuffer(pool.memory, dtype=torch.uint8).to(device)
    return DevicePool(memory.bytes, pool.group, pool.num_pages, memory.fd)


def memory_of(pool: Pool) -> memoryview:
    """Its bytes; of a pool on a device a copy."""
    if isinstance(pool, LocalPool):
        return pool.memory
    num_bytes = pool.num_pages * pool.group.page_bytes
    return pool.memory[:num_bytes].cpu().numpy().data


def pages_of(pool: Pool) -> NDArray[np.uint8]:
    """[pages, page bytes]; to write into it see `edited`."""
    return np.frombuffer(memory_of(pool), np.uint8).reshape(pool.num_pages, -1)


@contextmanager
def edited(pool: Pool) -> Iterator[NDArray[np.uint8]]:
    """[pages, page bytes]: what is written there is in the pool in the end."""
    pages = pages_of(pool)
    yield pages
    if isinstance(pool, DevicePool):
        import torch

        device = pool.memory.device
        pool.memory[: pages.size] = torch.from_numpy(pages).flatten().to(device)
        torch.cuda.synchronize(device)


def sums_of(pool: Pool, pages: PageIds, num_tokens: int | None = None) -> CellSums:
    return sum_pages(memory_of(pool), pages, pool.group, num_tokens)


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int64)
