"""Reader of ucx: links of a few connections each, all through one UCX worker."""

import contextlib
import itertools
import socket
import threading
import time

import msgspec
import numpy as np

from paceline.core.errors import PeerGone
from paceline.core.tls import TlsConfig
from paceline.kernels.pages import sum_pages
from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import CellSums, LocalPool, PageIds, Piece, TransportSettings
from paceline.kv_transfer.cells import scatter_cells
from paceline.kv_transfer.connection_link import ConnectionLink
from paceline.kv_transfer.geometry import decode_peer
from paceline.kv_transfer.tcp_client import TcpClient
from paceline.kv_transfer.ucx_transfer import UcxTransfer
from paceline.kv_transfer.ucx_wire import UcxEndpoint, first_tag
from paceline.kv_transfer.ucx_worker import UcxWorker

MAX_CONNECTIONS = 4  # a link; further reads wait for one
_GOODBYE_S = 0.5  # that a source takes at most to end what it sends


class UcxReader:
    transport = "ucx"

    def __init__(self, pool: LocalPool, settings: TransportSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._lock = threading.Lock()
        self._worker: UcxWorker | None = None  # until the first link
        self._channels = itertools.count()

    def connect(self, address: bytes, timeout_s: float) -> ConnectionLink:
        peer = decode_peer(address, wire.TcpAddress, "address")
        return ConnectionLink(
            self.transport,
            self._pool,
            lambda deadline: self._connect(peer, deadline),
            MAX_CONNECTIONS,
            timeout_s,
        )

    def close(self) -> None:
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def _connect(self, peer: wire.TcpAddress, deadline: float) -> "UcxConnection":
        with self._lock:
            if self._worker is None or self._worker.failure:
                self._worker = UcxWorker()
            worker = self._worker
        channel = next(self._channels)
        endpoint = msgspec.msgpack.encode(UcxEndpoint(worker.address, channel))
        token = wire.token_of(self._settings.secret, self.transport, peer.incarnation)
        hello = wire.ReaderHello(wire.VERSION, peer.incarnation, token, endpoint)
        return UcxConnection(self._pool, peer, hello, self._settings.tls, worker, channel, deadline)


class UcxConnection(TcpClient):
    """Asks over TCP, receives through UCX."""

    def __init__(
        self,
        pool: LocalPool,
        peer: wire.TcpAddress,
        hello: wire.ReaderHello,
        tls: TlsConfig,
        worker: UcxWorker,
        channel: int,
        deadline: float,
    ) -> None:
        super().__init__(pool, peer, hello, tls, deadline)
        self._number = channel
        self._num_pieces = 0
        self._is_shut = False
        try:
            self._channel = worker.open(self.endpoint, deadline)
        except BaseException:
            self.socket.close()
            raise

    def read(self, piece: Piece, deadline: float) -> CellSums:
        """Raises PeerGone, after which this connection must be closed, or KvUnavailable."""
        num_bytes = self.request(piece, deadline)
        tag = first_tag(self._number, self._num_pieces)
        self._num_pieces += 1
        if piece.num_tokens is None:
            return self._receive_pages(piece.destination_pages, tag, deadline)
        group, memory = self._pool.group, self._pool.memory
        cells = bytearray(num_bytes)
        transfer = UcxTransfer([memoryview(cells)], tag)
        self._channel.start(transfer, is_send=False)
        self._finish(transfer, 1, deadline)
        scatter_cells(cells, memory, piece.destination_pages, group, piece.num_tokens)
        return sum_pages(memory, piece.destination_pages, group, piece.num_tokens)

    def is_usable(self) -> bool:
        return not self._is_shut and super().is_usable()

    def shut(self) -> None:
        """The source hears of it, too, and ends what it sends: see `close`."""
        self._is_shut = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """The source closes first, when its messages have ended, unless it is silent. UCX 1.21 may
        die of a peer that goes away while it has bytes for it."""
        self.shut()
        ends = time.monotonic() + _GOODBYE_S
        with contextlib.suppress(PeerGone):
            while True:
                wire.receive(self.socket, 1, ends)
        self._channel.close()
        super().close()

    def _receive_pages(self, pages: PageIds, tag: int, deadline: float) -> CellSums:
        """Sums each page while the next ones arrive."""
        group, memory = self._pool.group, self._pool.memory
        sums = np.empty((len(pages), group.num_heads), dtype=np.uint64)
        starts = (pages * group.page_bytes).tolist()
        parts = [memory[start : start + group.page_bytes] for start in starts]
        transfer = UcxTransfer(parts, tag)
        self._channel.start(transfer, is_send=False)
        for i in range(len(pages)):
            self._finish(transfer, i + 1, deadline)
            sums[i] = sum_pages(memory, pages[i : i + 1], group)
        return sums

    def _finish(self, transfer: UcxTransfer, num_parts: int, deadline: float) -> None:
        deadline = min(deadline, time.monotonic() + wire.SILENT_AFTER_S)
        self._channel.finish(transfer, num_parts, deadline, self.is_usable)
