"""A reader's end of a TCP connection: the hellos, and the REPLY to each request."""

import contextlib
import socket
import time

import numpy as np

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.core.tls import TlsConfig
from paceline.core.tls_reasons import SET_UP
from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import LocalPool, Piece
from paceline.kv_transfer.geometry import check_equal, check_geometry, geometry_of, no_such_page
from paceline.kv_transfer.tls_socket import secured


class TcpClient:
    """Used by one thread at a time; `shut` may be called from any.

    `endpoint` is what the source said of itself beside its geometry.
    """

    def __init__(
        self,
        pool: LocalPool,
        address: wire.TcpAddress,
        hello: wire.ReaderHello,
        tls: TlsConfig,
        deadline: float,
    ) -> None:
        """Raises PeerGone when nobody answers, IncompatiblePeer when the ends do not match."""
        self._pool = pool
        _check_encryption(address, tls)
        connection = _connect(address, deadline)
        try:
            wire.prepare(connection)
            self.socket = secured(connection, tls, deadline, is_server=False)
            answer = self._greet(hello, deadline)
        except BaseException:
            connection.close()
            raise
        assert answer.geometry is not None
        self.num_source_pages = answer.geometry.num_pages
        self.endpoint = answer.endpoint

    def _greet(self, hello: wire.ReaderHello, deadline: float) -> wire.SourceHello:
        self._send(wire.hello_bytes(hello), deadline)
        answer = wire.receive_hello(self.socket, wire.SourceHello, deadline)
        check_equal("version", wire.VERSION, answer.version)
        if answer.refused or answer.geometry is None:
            field = answer.refused or "geometry"
            raise IncompatiblePeer(f"the source refused our {field}", field=field)
        check_geometry(geometry_of(self._pool), answer.geometry)
        return answer

    def is_usable(self) -> bool:
        return wire.is_quiet(self.socket)

    def request(self, piece: Piece, deadline: float) -> int:
        """Asks for `piece`; returns how many bytes follow the REPLY.

        Raises PeerGone, after which this connection must be closed, or KvUnavailable.
        """
        pages = np.ascontiguousarray(piece.source_pages, dtype="<i8")
        num_tokens = piece.num_tokens or 0
        request = wire.REQUEST.pack(wire.REQUEST_MAGIC, len(pages), num_tokens)
        self._send(request + pages.tobytes(), deadline)
        expected = self._num_bytes(piece)
        status, value = wire.REPLY.unpack(wire.receive(self.socket, wire.REPLY.size, deadline))
        if status == wire.NO_SUCH_PAGE:
            raise no_such_page(value, self.num_source_pages)
        if status != wire.OK or value != expected:
            raise PeerGone("the peer does not speak this protocol")
        return expected

    def _num_bytes(self, piece: Piece) -> int:
        group = self._pool.group
        num_bytes = len(piece.source_pages) * group.page_bytes
        if piece.num_tokens is None:
            return num_bytes
        return num_bytes // group.cell_bytes * group.tail_bytes(piece.num_tokens)

    def _send(self, data: bytes, deadline: float) -> None:
        wire.set_timeout(self.socket, socket.SO_SNDTIMEO, max(deadline - time.monotonic(), 1e-6))
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise PeerGone(f"the connection broke: {error.strerror}") from None

    def shut(self) -> None:
        """Ends a read that is going on in another thread."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


def _check_encryption(address: wire.TcpAddress, tls: TlsConfig) -> None:
    if address.is_encrypted != tls.is_on:
        which = "the source encrypts" if address.is_encrypted else "the source does not encrypt"
        raise IncompatiblePeer(f"{which}, we do otherwise: {SET_UP}", field="tls")


def _connect(address: wire.TcpAddress, deadline: float) -> socket.socket:
    timeout_s = max(deadline - time.monotonic(), 1e-3)
    try:
        return socket.create_connection((address.host, address.port), timeout=timeout_s)
    except OSError as error:
        raise PeerGone(f"the source does not answer: {error.strerror or error}") from None
