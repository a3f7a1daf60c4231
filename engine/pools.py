"""Memory of a rank's page pools, and the sums of what lies in it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from paceline.core.kv_layout import KVLayout, PageGroup
from paceline.kernels.checksum import sum_pages_on_device
from paceline.kernels.pages import sum_pages


class PageSums(Protocol):
    """One checksum a KV head, for each page; of its first `num_tokens` tokens if given."""

    def __call__(
        self, pages: Sequence[int], num_tokens: int | None = None
    ) -> list[tuple[int, ...]]: ...


def allocate_pools(layout: KVLayout, num_pages: int, device: str) -> tuple[torch.Tensor, ...]:
    """A zeroed pool, [num_pages, *page.shape], which all page groups share."""
    page = layout.page
    shape = (num_pages, *page.shape)
    return (torch.zeros(shape, dtype=getattr(torch, page.dtype), device=device),)


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


def page_sums(pool: torch.Tensor, memory: memoryview | None, group: PageGroup) -> PageSums:
    """Sums over `memory`; on the device if the pool is not on the CPU."""

    def on_cpu(pages: Sequence[int], num_tokens: int | None = None) -> list[tuple[int, ...]]:
        assert memory is not None
        sums = sum_pages(memory, np.asarray(pages, np.int64), group, num_tokens)
        return [tuple(row) for row in sums.tolist()]

    def on_device(pages: Sequence[int], num_tokens: int | None = None) -> list[tuple[int, ...]]:
        ids = torch.tensor(pages, dtype=torch.int64, device=pool.device)
        sums = sum_pages_on_device(pool, ids, group, num_tokens).cpu().numpy().view(np.uint64)
        return [tuple(row) for row in sums.tolist()]

    return on_device if pool.device.type != "cpu" else on_cpu
