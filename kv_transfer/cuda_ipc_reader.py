"""Reader of cuda_ipc: maps a source's pool and gathers from it on this pool's device.

The source's pool may be on another device, which this process must see too; the gather then reads
over the link between the two.
"""

import os
import threading
import time

import torch

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.kernels import backend
from paceline.kv_transfer.base import MAX_PIECE_PAGES, CellSums, DevicePool, Piece
from paceline.kv_transfer.cuda_driver import DriverError
from paceline.kv_transfer.cuda_memory import map_device_memory
from paceline.kv_transfer.descriptor_reader import Offer, SourceConnection, receive_descriptor
from paceline.kv_transfer.device_copies import DeviceCopies, as_pages
from paceline.kv_transfer.geometry import (
    check_destination_pages,
    check_source_pages,
    geometry_of,
)


class CudaIpcReader:
    """All links of a reader share its streams and buffers."""

    transport = "cuda_ipc"

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._copies = DeviceCopies(pool)

    def connect(self, address: bytes, timeout_s: float) -> "CudaIpcLink":
        offer = receive_descriptor(address, geometry_of(self._pool), timeout_s)
        try:
            words = self._map(offer)
        except BaseException:
            offer.connection.close()
            raise
        finally:
            os.close(offer.fd)
        return CudaIpcLink(offer.connection, words, self._pool, self._copies)

    def close(self) -> None: ...

    def _map(self, offer: Offer) -> torch.Tensor:
        group = self._pool.group
        if offer.num_bytes < offer.num_pages * group.page_bytes:
            reason = f"{offer.num_bytes} bytes are too few for {offer.num_pages} pages"
            raise IncompatiblePeer(reason, field="pool_bytes")
        try:
            memory = map_device_memory(offer.fd, offer.num_bytes, self._pool.memory.device)
        except DriverError as error:  # another driver's memory, or a device out of our reach
            reason = f"the source's memory cannot be mapped: {error}"
            raise IncompatiblePeer(reason, field="pool_bytes") from None
        ours = self._pool.memory
        if memory.device != ours.device and not backend.uses_triton(ours):
            reason = f"only Triton's kernels copy from {memory.device} to {ours.device}"
            raise IncompatiblePeer(reason, field="device")
        return as_pages(memory, group, offer.num_pages)


class CudaIpcLink:
    """A thread waits for the source's end and then lets go of its memory, which is not free for
    others before: the source's successor needs it."""

    transport = "cuda_ipc"

    def __init__(
        self,
        connection: SourceConnection,
        source: torch.Tensor,
        pool: DevicePool,
        copies: DeviceCopies,
    ) -> None:
        self._connection = connection
        self._source: torch.Tensor | None = source
        self._num_pages = len(source)
        self._pool = pool
        self._copies = copies
        self._is_neighbour = source.device == pool.memory.device
        if self._is_neighbour:
            pool.neighbours.came()
        self._watch = threading.Thread(target=self._let_go, name="cuda-ipc-link", daemon=True)
        self._watch.start()

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        assert len(piece.source_pages) <= MAX_PIECE_PAGES
        deadline = time.monotonic() + timeout_s
        source = self._source  # held by this read: who lets go meanwhile unmaps afterwards
        if source is None:
            raise PeerGone("the source died or closed, or the link was closed")
        check_source_pages(piece.source_pages, self._num_pages)
        check_destination_pages(piece.destination_pages, self._pool.num_pages)
        self._connection.check_alive()
        sums = self._copies.copy(source, piece, deadline)
        self._connection.check_alive()
        return sums

    def close(self) -> None:
        self._connection.shut()
        self._watch.join()
        self._connection.close()

    def _let_go(self) -> None:
        self._connection.wait_for_end()
        self._source = None
        if self._is_neighbour:
            self._pool.neighbours.left()
