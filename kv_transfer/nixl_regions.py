"""Page ids as what NIXL reads and writes: addresses and lengths."""

import numpy as np
from numpy.typing import NDArray

from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer.base import PageIds

Regions = NDArray[np.uint64]  # [n, 3]: address, bytes, device


def regions_of(
    base_address: int, pages: PageIds, group: PageGroup, num_tokens: int | None
) -> Regions:
    """Whole pages of the pool at `base_address`, or the used start of each of their cells."""
    page_starts = pages * group.page_bytes + base_address
    if num_tokens is None:
        starts, num_bytes = page_starts, group.page_bytes
    else:
        cells = np.arange(0, group.page_bytes, group.cell_bytes)
        starts = (page_starts[:, None] + cells).reshape(-1)
        num_bytes = group.tail_bytes(num_tokens)
    regions = np.zeros((len(starts), 3), np.uint64)
    regions[:, 0] = starts
    regions[:, 1] = num_bytes
    return regions
