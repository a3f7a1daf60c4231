"""One connection of a tcp link: asks for one piece at a time and receives it into the pool."""

import numpy as np

from paceline.kernels.pages import sum_pages
from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import CellSums, PageIds, Piece
from paceline.kv_transfer.cells import scatter_cells
from paceline.kv_transfer.tcp_client import TcpClient


class TcpConnection(TcpClient):
    def read(self, piece: Piece, deadline: float) -> CellSums:
        """Raises PeerGone, after which this connection must be closed, or KvUnavailable."""
        num_bytes = self.request(piece, deadline)
        if piece.num_tokens is None:
            return self._receive_pages(piece.destination_pages, deadline)
        group, memory = self._pool.group, self._pool.memory
        cells = wire.receive(self.socket, num_bytes, deadline)
        scatter_cells(cells, memory, piece.destination_pages, group, piece.num_tokens)
        return sum_pages(memory, piece.destination_pages, group, piece.num_tokens)

    def _receive_pages(self, pages: PageIds, deadline: float) -> CellSums:
        """Sums each page while it is in the cache."""
        group, memory = self._pool.group, self._pool.memory
        sums = np.empty((len(pages), group.num_heads), dtype=np.uint64)
        for i, start in enumerate((pages * group.page_bytes).tolist()):
            wire.receive_into(self.socket, memory[start : start + group.page_bytes], deadline)
            sums[i] = sum_pages(memory, pages[i : i + 1], group)
        return sums
