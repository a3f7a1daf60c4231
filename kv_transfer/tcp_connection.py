"""One connection of a tcp link: says hello, then asks for one piece at a time."""

import contextlib
import socket
import time

import numpy as np

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.kernels.pages import sum_pages
from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import CellSums, LocalPool, PageIds, Piece
from paceline.kv_transfer.cells import scatter_cells
from paceline.kv_transfer.geometry import check_equal, check_geometry, geometry_of, no_such_page


class TcpConnection:
    """Used by one thread at a time; `shut` may be called from any."""

    def __init__(
        self, pool: LocalPool, address: wire.TcpAddress, token: bytes, deadline: float
    ) -> None:
        self._pool = pool
        self._socket = _connect(address, deadline)
        try:
            self.num_source_pages = self._greet(address, token, deadline)
        except BaseException:
            self._socket.close()
            raise

    def _greet(self, address: wire.TcpAddress, token: bytes, deadline: float) -> int:
        wire.prepare(self._socket)
        hello = wire.ReaderHello(wire.VERSION, address.incarnation, token)
        self._send(wire.hello_bytes(hello), deadline)
        answer = wire.receive_hello(self._socket, wire.SourceHello, deadline)
        check_equal("version", wire.VERSION, answer.version)
        if answer.refused or answer.geometry is None:
            field = answer.refused or "geometry"
            raise IncompatiblePeer(f"the source refused our {field}", field=field)
        check_geometry(geometry_of(self._pool), answer.geometry)
        return answer.geometry.num_pages

    def is_usable(self) -> bool:
        """Whether an idle connection is still open and quiet, as far as this host knows."""
        try:
            self._socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def read(self, piece: Piece, deadline: float) -> CellSums:
        """Raises PeerGone, after which this connection must be closed, or KvUnavailable."""
        pages = np.ascontiguousarray(piece.source_pages, dtype="<i8")
        num_tokens = piece.num_tokens or 0
        request = wire.REQUEST.pack(wire.REQUEST_MAGIC, len(pages), num_tokens)
        self._send(request + pages.tobytes(), deadline)
        group = self._pool.group
        num_bytes = len(pages) * group.page_bytes
        if piece.num_tokens is None:
            self._receive_reply(num_bytes, deadline)
            return self._receive_pages(piece.destination_pages, deadline)
        num_bytes = num_bytes // group.cell_bytes * group.tail_bytes(piece.num_tokens)
        self._receive_reply(num_bytes, deadline)
        cells = wire.receive(self._socket, num_bytes, deadline)
        scatter_cells(cells, self._pool.memory, piece.destination_pages, group, piece.num_tokens)
        return sum_pages(self._pool.memory, piece.destination_pages, group, piece.num_tokens)

    def _receive_reply(self, num_bytes: int, deadline: float) -> None:
        status, value = wire.REPLY.unpack(wire.receive(self._socket, wire.REPLY.size, deadline))
        if status == wire.NO_SUCH_PAGE:
            raise no_such_page(value, self.num_source_pages)
        if status != wire.OK or value != num_bytes:
            raise PeerGone("the peer does not speak this protocol")

    def _receive_pages(self, pages: PageIds, deadline: float) -> CellSums:
        """Sums each page while it is in the cache."""
        group, memory = self._pool.group, self._pool.memory
        sums = np.empty((len(pages), group.num_heads), dtype=np.uint64)
        for i, start in enumerate((pages * group.page_bytes).tolist()):
            wire.receive_into(self._socket, memory[start : start + group.page_bytes], deadline)
            sums[i] = sum_pages(memory, pages[i : i + 1], group)
        return sums

    def _send(self, data: bytes, deadline: float) -> None:
        wire.set_timeout(self._socket, socket.SO_SNDTIMEO, max(deadline - time.monotonic(), 1e-6))
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise PeerGone(f"the connection broke: {error.strerror}") from None

    def shut(self) -> None:
        """Ends a read that is going on in another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _connect(address: wire.TcpAddress, deadline: float) -> socket.socket:
    timeout_s = max(deadline - time.monotonic(), 1e-3)
    try:
        return socket.create_connection((address.host, address.port), timeout=timeout_s)
    except OSError as error:
        raise PeerGone(f"the source does not answer: {error.strerror or error}") from None
