"""The source process of benchmarks.transfer: a pool by every transport, and by the floors' means.

A plain socket sends pages, scattered, to whoever names their size and number; a NIXL agent of its
own lets itself be read bare. Neither verifies anything.
"""

import contextlib
import importlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from paceline.core.kv_layout import PageGroup
from paceline.kernels.pages import sum_pages
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import CellSums, LocalPool, PageIds, Source, TransportSettings
from paceline.kv_transfer.nixl_regions import Regions
from paceline.kv_transfer.pool_memory import new_pool_file, size_pool_memory

GROUPS = {  # by page size: an 8B Llama in bfloat16 (2 MiB), and a small model (256 KiB)
    2 << 20: PageGroup("full", num_layers=32, num_heads=8, head_dim=128, dtype="bfloat16"),
    256 << 10: PageGroup("full", num_layers=16, num_heads=4, head_dim=64, dtype="bfloat16"),
}
POOL_BYTES = 128 << 20
SETTINGS = TransportSettings(incarnation="benchmark")
PULL = struct.Struct("<QQ")  # page bytes, number of pages


@dataclass(frozen=True, slots=True)
class Exported:
    """What the source process tells, by page size: addresses by transport, sums of all pages."""

    addresses: dict[int, dict[str, bytes]]
    sums: dict[int, CellSums]
    socket_port: int
    nixl_metadata: bytes  # empty without NIXL
    base_address: int


def make_pool(group: PageGroup, memory: memoryview, fd: int) -> LocalPool:
    return LocalPool(memory, group, POOL_BYTES // group.page_bytes, fd)


def scattered(group: PageGroup, num_pages: int, seed: int) -> PageIds:
    pages = np.random.default_rng(seed).permutation(POOL_BYTES // group.page_bytes)
    return pages[:num_pages].astype(np.int64)


def serve(channel: Connection, transports: Sequence[str]) -> None:
    """Exports a pool of random bytes until the channel closes."""
    memory = size_pool_memory(new_pool_file(), POOL_BYTES)
    words = np.frombuffer(memory.view, np.uint64)
    words[:] = np.random.default_rng(0).integers(1 << 63, size=len(words), dtype=np.uint64)
    sources: list[Source] = []
    addresses: dict[int, dict[str, bytes]] = {}
    sums = {}
    for page_bytes, group in GROUPS.items():
        pool = make_pool(group, memory.view, memory.fd)
        made = {name: registry.make_source(name, pool, SETTINGS) for name in transports}
        for source in made.values():
            source.start()
        sources += made.values()
        addresses[page_bytes] = {name: source.address() for name, source in made.items()}
        sums[page_bytes] = sum_pages(pool.memory, np.arange(pool.num_pages), group)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_plainly, args=(listener, memory.view), daemon=True).start()
    agent = BareNixl("source", memory.view) if "nixl" in transports else None
    metadata = agent.metadata if agent else b""
    port = listener.getsockname()[1]
    channel.send(Exported(addresses, sums, port, metadata, words.ctypes.data))
    with contextlib.suppress(EOFError):
        channel.recv()
    for source in sources:
        source.close()


def send_plainly(listener: socket.socket, memory: memoryview) -> None:
    connection, _ = listener.accept()
    while request := connection.recv(PULL.size, socket.MSG_WAITALL):
        page_bytes, num_pages = PULL.unpack(request)
        pages = scattered(GROUPS[page_bytes], num_pages, seed=1)
        for start in (pages * page_bytes).tolist():
            connection.sendall(memory[start : start + page_bytes])


class BareNixl:
    """NIXL's own calls: one transfer of a list of descriptors, polled until it is done."""

    def __init__(self, name: str, memory: memoryview) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        self._nixl: Any = importlib.import_module("nixl_cu12._bindings")
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = 10_000  # microseconds; with 0 it never sleeps and slows all others down
        self._agent = self._nixl.nixlAgent(f"bare-{name}", config)
        self._agent.createBackend("UCX", {})
        self.base_address: int = np.frombuffer(memory, np.uint8).ctypes.data
        region = (self.base_address, memory.nbytes, 0, "")
        self._agent.registerMem(self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [region]), [])
        self.metadata: bytes = self._agent.getLocalMD()

    def add_peer(self, metadata: bytes) -> str:
        name: bytes = self._agent.loadRemoteMD(metadata)
        return name.decode()

    def read(self, peer: str, local: Regions, remote: Regions) -> None:
        nixl = self._nixl
        lists = [nixl.nixlXferDList(nixl.DRAM_SEG, regions) for regions in (local, remote)]
        handle = self._agent.createXferReq(nixl.NIXL_READ, *lists, peer, b"", [])
        status = self._agent.postXferReq(handle)
        while status == nixl.NIXL_IN_PROG:
            status = self._agent.getXferStatus(handle)
        self._agent.releaseXferReq(handle)
        assert status == nixl.NIXL_SUCCESS
