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
    if num_tokens is None:
        stride = num_bytes = group.page_bytes
    else:
        stride, num_bytes = group.cell_bytes, group.tail_bytes(num_tokens)
    offsets = np.arange(0, group.page_bytes, stride)
    starts = (pages[:, None] * group.page_bytes + offsets).reshape(-1)
    regions = np.zeros((len(starts), 3), np.uint64)
    regions[:, 0] = starts + base_address
    regions[:, 1] = num_bytes
    return regions
