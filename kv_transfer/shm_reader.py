"""Reader of shm: maps a source's pool read-only and copies from it."""

import os

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.kernels.pages import copy_pages
from paceline.kv_transfer.base import CellSums, LocalPool, Piece
from paceline.kv_transfer.descriptor_reader import SourceConnection, receive_descriptor
from paceline.kv_transfer.geometry import check_equal, check_source_pages, geometry_of
from paceline.kv_transfer.pool_memory import has_fixed_size, map_read_only


class ShmReader:
    transport = "shm"

    def __init__(self, pool: LocalPool) -> None:
        self._pool = pool

    def connect(self, address: bytes, timeout_s: float) -> "ShmLink":
        offer = receive_descriptor(address, geometry_of(self._pool), timeout_s)
        try:
            check_equal("pool_bytes", offer.num_bytes, os.fstat(offer.fd).st_size)
            if not has_fixed_size(offer.fd):
                raise IncompatiblePeer("the source's memory could shrink", field="pool_bytes")
            memory = map_read_only(offer.fd)
        except BaseException:
            offer.connection.close()
            raise
        finally:
            os.close(offer.fd)
        return ShmLink(offer.connection, memory, offer.num_pages, self._pool)

    def close(self) -> None: ...


class ShmLink:
    transport = "shm"

    def __init__(
        self, connection: SourceConnection, memory: memoryview, num_pages: int, pool: LocalPool
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
        self._connection.check_alive()
        sums = copy_pages(
            self._pool.memory,
            memory,
            piece.destination_pages,
            piece.source_pages,
            self._pool.group,
            piece.num_tokens,
        )
        self._connection.check_alive()
        return sums

    def close(self) -> None:
        self._memory = None
        self._connection.close()
