"""Source of tcp: sends pages straight from the pool."""

from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import PageIds
from paceline.kv_transfer.cells import gather_cells
from paceline.kv_transfer.tcp_server import TcpServer


class TcpSource(TcpServer):
    """Exports a pool on one port."""

    transport = "tcp"

    def _serve(self, connection: wire.Stream, hello: wire.ReaderHello) -> None:
        while True:
            self._send_pages(connection, *self._next_pages(connection))

    def _send_pages(self, connection: wire.Stream, pages: PageIds, num_tokens: int | None) -> None:
        group, memory = self._pool.group, self._pool.memory
        if num_tokens is not None:
            cells = gather_cells(memory, pages, group, num_tokens)
            connection.sendall(wire.REPLY.pack(wire.OK, len(cells)) + cells)
            return
        connection.sendall(wire.REPLY.pack(wire.OK, len(pages) * group.page_bytes))
        for start in (pages * group.page_bytes).tolist():
            connection.sendall(memory[start : start + group.page_bytes])
