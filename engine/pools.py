"""Memory of a rank's page pools, and the sums of what lies in it."""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.core.kv_layout import KVLayout, PageGroup
from paceline.kernels.checksum import sum_pages_on_device
from paceline.kernels.pages import sum_pages
from paceline.kernels.transfer import to_device


def allocate_pools(layout: KVLayout, num_pages: int, device: str) -> tuple[torch.Tensor, ...]:
    """A zeroed pool, [num_pages, *page.shape], which all page groups share, for each rank."""
    page, num_ranks = layout.page, len(layout.ranks)
    shape = (num_ranks * num_pages, *page.shape)
    whole = torch.zeros(shape, dtype=getattr(torch, page.dtype), device=device)
    return torch.split(whole, num_pages)


def view_pool(memory: memoryview, group: PageGroup) -> torch.Tensor:
    """A pool over memory that is shared with others; as many pages as it holds."""
    num_pages = len(memory) // group.page_bytes
    count = num_pages * group.page_bytes
    return view_bytes(torch.frombuffer(memory, dtype=torch.uint8, count=count), group)


def view_bytes(values: torch.Tensor, group: PageGroup) -> torch.Tensor:
    """A pool over uint8 [whole pages], on any device."""
    return values.view(getattr(torch, group.dtype)).view(-1, *group.shape)


def pool_memory(pool: torch.Tensor) -> memoryview:
    """The bytes of a pool on the CPU."""
    memory: memoryview = pool.view(torch.uint8).numpy().reshape(-1).data
    return memory


Sums = list[tuple[int, ...]]  # by page, one a KV head, rank after rank


class PageSums:
    """One checksum a KV head, for each page; of its first `num_tokens` tokens if given.

    Over `memory`, where the pools of all ranks follow each other, or on the device if the one pool
    is not on the CPU."""

    def __init__(
        self, pool: torch.Tensor, memory: memoryview | None, group: PageGroup, num_ranks: int = 1
    ) -> None:
        assert memory is not None or (pool.device.type != "cpu" and num_ranks == 1)
        self._pool = pool
        self._memory = memory
        self._group = group
        self._num_ranks = num_ranks

    def launch(self, pages: Sequence[int], num_tokens: int | None = None) -> torch.Tensor:
        """[pages, heads], the bits of the unsigned sums as int64."""
        ids = np.asarray(pages, np.int64)
        if self._memory is not None:
            step = len(self._memory) // self._group.page_bytes // self._num_ranks
            sums = [
                sum_pages(self._memory, first + ids, self._group, num_tokens)
                for first in range(0, step * self._num_ranks, step)
            ]
            joined = sums[0] if len(sums) == 1 else np.concatenate(sums, axis=1)
            return torch.from_numpy(joined.view(np.int64))
        (on_device,) = to_device(self._pool.device, ids)
        return sum_pages_on_device(self._pool, on_device, self._group, num_tokens)

    def __call__(self, pages: Sequence[int], num_tokens: int | None = None) -> Sums:
        return unsigned(self.launch(pages, num_tokens).cpu())


def unsigned(sums: torch.Tensor) -> Sums:
    """What lies on the host already."""
    return [tuple(row) for row in sums.numpy().view(np.uint64).tolist()]
