"""The used starts of pages' cells as one run of bytes: what travels of a partial page."""

import numpy as np
from numpy.typing import NDArray

from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer.base import PageIds


def gather_cells(memory: memoryview, pages: PageIds, group: PageGroup, num_tokens: int) -> bytes:
    """The first `num_tokens` tokens of every cell of `pages`, in page order."""
    used = _cells(memory, group)[pages, :, : group.tail_bytes(num_tokens)]
    return used.tobytes()


def scatter_cells(
    cells: bytes | bytearray, memory: memoryview, pages: PageIds, group: PageGroup, num_tokens: int
) -> None:
    """Puts what gather_cells took into `pages`; the rest of each cell stays as it was."""
    num_bytes = group.tail_bytes(num_tokens)
    values = np.frombuffer(cells, np.uint8).reshape(len(pages), -1, num_bytes)
    _cells(memory, group)[pages, :, :num_bytes] = values


def _cells(memory: memoryview, group: PageGroup) -> NDArray[np.uint8]:
    cells_per_page = group.page_bytes // group.cell_bytes
    return np.frombuffer(memory, np.uint8).reshape(-1, cells_per_page, group.cell_bytes)
