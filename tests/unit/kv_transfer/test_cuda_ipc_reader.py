import os
import socket
from typing import cast

import pytest
import torch

from paceline.core.errors import IncompatiblePeer
from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer import cuda_ipc_reader
from paceline.kv_transfer.base import DevicePool
from paceline.kv_transfer.descriptor_reader import Offer, SourceConnection
from paceline.kv_transfer.device_copies import DeviceCopies

GROUP = PageGroup("full", num_layers=2, num_heads=2, head_dim=8)
NUM_PAGES = 4


def test_a_source_on_another_device_is_refused_where_kernels_cannot_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No device is here: the pool is on the CPU, and the source's memory seems to be elsewhere."""
    num_bytes = NUM_PAGES * GROUP.page_bytes
    ours, source = socket.socketpair()
    fd = os.memfd_create("source")
    offer = Offer(SourceConnection(ours), fd, num_bytes, NUM_PAGES)

    def map_elsewhere(fd: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    monkeypatch.setattr(cuda_ipc_reader, "DeviceCopies", lambda pool: None)
    monkeypatch.setattr(cuda_ipc_reader, "receive_descriptor", lambda *_: offer)
    monkeypatch.setattr(cuda_ipc_reader, "map_device_memory", map_elsewhere)
    pool = DevicePool(torch.zeros(num_bytes, dtype=torch.uint8), GROUP, NUM_PAGES, -1)
    reader = cuda_ipc_reader.CudaIpcReader(pool)
    with source, pytest.raises(IncompatiblePeer, match="Triton's kernels") as caught:
        reader.connect(b"", timeout_s=1)
    assert caught.value.field == "device"
    assert ours.fileno() == -1, "the connection is left open"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(("device", "is_neighbour"), [("cpu", True), ("meta", False)])
def test_a_source_on_the_pools_device_is_a_neighbour_until_its_end(
    device: str, is_neighbour: bool
) -> None:
    ours, source = socket.socketpair()
    pages = torch.zeros(NUM_PAGES, GROUP.page_bytes, dtype=torch.uint8, device=device)
    pool = DevicePool(torch.zeros(8, dtype=torch.uint8), GROUP, NUM_PAGES, -1)
    copies = cast(DeviceCopies, None)  # nothing is read
    link = cuda_ipc_reader.CudaIpcLink(SourceConnection(ours), pages, pool, copies)
    assert bool(pool.neighbours) == is_neighbour
    source.close()
    link.close()
    assert not pool.neighbours
