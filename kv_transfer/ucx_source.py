"""Source of ucx: requests come over TCP, pages leave through UCX, straight from the pool."""

import itertools
import time

from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import LocalPool, PageIds, TransportSettings
from paceline.kv_transfer.cells import gather_cells
from paceline.kv_transfer.geometry import decode_peer
from paceline.kv_transfer.tcp_server import TcpServer
from paceline.kv_transfer.ucx_transfer import UcxTransfer
from paceline.kv_transfer.ucx_wire import UcxEndpoint, first_tag
from paceline.kv_transfer.ucx_worker import UcxWorker


class UcxSource(TcpServer):
    """Exports a pool; only readers that know the secret learn its UCX address."""

    transport = "ucx"

    def __init__(self, pool: LocalPool, settings: TransportSettings) -> None:
        self._worker = UcxWorker()
        try:
            super().__init__(pool, settings)
        except BaseException:
            self._worker.close()
            raise

    def close(self) -> None:
        super().close()
        self._worker.close()

    def _endpoint(self) -> bytes:
        return self._worker.address

    def _serve(self, connection: wire.Stream, hello: wire.ReaderHello) -> None:
        reader = decode_peer(hello.endpoint, UcxEndpoint, "endpoint")
        channel = self._worker.open(reader.address, time.monotonic() + wire.DEAD_AFTER_S)
        try:
            for i in itertools.count():
                parts = self._parts(*self._next_pages(connection))
                num_bytes = sum(part.nbytes for part in parts)
                connection.sendall(wire.REPLY.pack(wire.OK, num_bytes))
                transfer = UcxTransfer(parts, first_tag(reader.channel, i))
                channel.start(transfer, is_send=True)
                for num_parts in range(1, len(parts) + 1):
                    deadline = time.monotonic() + wire.DEAD_AFTER_S
                    channel.finish(transfer, num_parts, deadline, lambda: wire.is_quiet(connection))
        finally:
            channel.close()

    def _parts(self, pages: PageIds, num_tokens: int | None) -> list[memoryview]:
        """A message each."""
        group, memory = self._pool.group, self._pool.memory
        if num_tokens is not None:
            return [memoryview(gather_cells(memory, pages, group, num_tokens))]
        starts = (pages * group.page_bytes).tolist()
        return [memory[start : start + group.page_bytes] for start in starts]
