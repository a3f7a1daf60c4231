"""Reader of shm: maps a source's pool read-only and copies from it."""

import os
import socket

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.kernels.pages import copy_pages
from paceline.kv_transfer.base import CellSums, LocalPool, Piece
from paceline.kv_transfer.geometry import (
    check_equal,
    check_geometry,
    check_source_pages,
    decode_peer,
    geometry_of,
)
from paceline.kv_transfer.host import host_identity
from paceline.kv_transfer.pool_memory import has_fixed_size, map_read_only
from paceline.kv_transfer.shm_wire import MAX_HELLO_BYTES, VERSION, ShmAddress, ShmHello


class ShmReader:
    transport = "shm"

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool

    def connect(self, address: bytes, timeout_s: float) -> "ShmLink":
        peer = decode_peer(address, ShmAddress, "address")
        check_equal("host", host_identity(), peer.host)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(timeout_s)
            message, fd = _receive_hello(connection, peer.socket_name)
            try:
                hello = decode_peer(message, ShmHello, "hello")
                memory = self._map(fd, hello, peer.incarnation)
            finally:
                os.close(fd)
            connection.setblocking(False)
        except BaseException:
            connection.close()
            raise
        return ShmLink(connection, memory, hello.geometry.num_pages, self._pool)

    def _map(self, fd: int, hello: ShmHello, incarnation: str) -> memoryview:
        check_equal("version", VERSION, hello.version)
        check_equal("incarnation", incarnation, hello.incarnation)
        check_geometry(geometry_of(self._pool), hello.geometry)
        num_bytes = hello.geometry.num_pages * self._pool.group.page_bytes
        check_equal("pool_bytes", num_bytes, os.fstat(fd).st_size)
        if not has_fixed_size(fd):
            raise IncompatiblePeer("the source's memory could shrink", field="pool_bytes")
        return map_read_only(fd)


class ShmLink:
    transport = "shm"

    def __init__(
        self, connection: socket.socket, memory: memoryview, num_pages: int, pool: LocalPool
    ) -> None:
        self._connection = connection
        self._memory: memoryview | None = memory
        self._num_pages = num_pages
        self._pool = pool

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        memory = self._memory  # held by this read: a close meanwhile unmaps afterwards
        if memory is None:
            raise PeerGone("the link is closed")
        check_source_pages(piece.source_pages, self._num_pages)
        self._check_alive()
        sums = copy_pages(
            self._pool.memory,
            memory,
            piece.destination_pages,
            piece.source_pages,
            self._pool.group,
            piece.num_tokens,
        )
        self._check_alive()
        return sums

    def close(self) -> None:
        self._memory = None
        self._connection.close()

    def _check_alive(self) -> None:
        """The source never speaks after its hello: anything to read is its end."""
        try:
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            pass
        raise PeerGone("the source died or closed")


def _receive_hello(connection: socket.socket, socket_name: str) -> tuple[bytes, int]:
    try:
        connection.connect(socket_name)
        message, fds, _, _ = socket.recv_fds(
            connection, MAX_HELLO_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
    except OSError as error:
        raise PeerGone(f"the source does not answer: {error.strerror or error}") from None
    if not fds:
        raise PeerGone("the source closed the connection: it is full, or of another user")
    return message, fds[0]
