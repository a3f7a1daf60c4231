"""Verified pull of a 4096-token prompt between two processes, against what the machine can do.

shm_of_memcpy: one thread, scattered pages, verified, over one 64 MiB memcpy.
tcp_of_socket: the same over plain blocking sockets between two processes that verify equally.
The geometry is SmolLM2-135M in float32: 256 pages of 720 KiB.
"""

import contextlib
import socket
import statistics
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.common import MEMCPY_BYTES, REPEATS, Memcpy, Options, publish, seconds, show
from benchmarks.source_process import source_process
from benchmarks.verified_pull import verified_pull
from paceline.core.kv_layout import PageGroup
from paceline.kernels.pages import sum_pages
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import CellSums, LocalPool, PageIds, TransportSettings
from paceline.kv_transfer.pool_memory import new_pool_file, size_pool_memory

GROUP = PageGroup("full", num_layers=30, num_heads=3, head_dim=64)
NUM_PAGES = 256
SETTINGS = TransportSettings(incarnation="benchmark")
TRANSPORTS = ("shm", "tcp")


@dataclass(frozen=True, slots=True)
class Peer:
    """What the source process tells: addresses by transport, the plain socket, the sums."""

    addresses: dict[str, bytes]
    socket_port: int
    sums: CellSums


def make_pool() -> LocalPool:
    memory = size_pool_memory(new_pool_file(), NUM_PAGES * GROUP.page_bytes)
    return LocalPool(memory.view, GROUP, NUM_PAGES, memory.fd)


def scattered_pages(seed: int) -> PageIds:
    return np.random.default_rng(seed).permutation(NUM_PAGES).astype(np.int64)


def serve(channel: Connection) -> None:
    """The source process: exports a pool of random bytes until the channel closes."""
    pool = make_pool()
    np.frombuffer(pool.memory, np.uint8)[:] = np.frombuffer(
        np.random.default_rng(0).bytes(len(pool.memory)), np.uint8
    )
    sources = {name: registry.make_source(name, pool, SETTINGS) for name in TRANSPORTS}
    for source in sources.values():
        source.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=send_plainly, args=(listener, pool), daemon=True).start()
    addresses = {name: source.address() for name, source in sources.items()}
    sums = sum_pages(pool.memory, np.arange(NUM_PAGES), GROUP)
    channel.send(Peer(addresses, listener.getsockname()[1], sums))
    with contextlib.suppress(EOFError):
        channel.recv()


def send_plainly(listener: socket.socket, pool: LocalPool) -> None:
    """The yardstick's sender: each byte asks for all pages, scattered."""
    connection, _ = listener.accept()
    starts = (scattered_pages(1) * GROUP.page_bytes).tolist()
    while connection.recv(1):
        for start in starts:
            connection.sendall(pool.memory[start : start + GROUP.page_bytes])


def receive_plainly(connection: socket.socket, pool: LocalPool, sums: CellSums) -> None:
    """The yardstick's receiver: scattered pages, verified while they are in the cache."""
    connection.sendall(b"x")
    for source_page, page in zip(scattered_pages(1), scattered_pages(2), strict=True):
        start, end = page * GROUP.page_bytes, (page + 1) * GROUP.page_bytes
        while start < end:
            start += connection.recv_into(pool.memory[start:end])
        arrived = sum_pages(pool.memory, np.array([page]), GROUP)
        assert np.array_equal(arrived[0], sums[source_page])


def measure_pulls(repeats: int) -> dict[str, float]:
    """GB/s of each way, medians; the ways take turns so that noise hits all alike."""
    pool = make_pool()
    with (
        source_process(serve) as peer,
        socket.create_connection(("127.0.0.1", peer.socket_port)) as plain,
    ):
        calls: dict[str, Callable[[], None]] = {
            "memcpy": Memcpy(),
            "socket": lambda: receive_plainly(plain, pool, peer.sums),
        }
        for name in TRANSPORTS:
            calls[name] = puller(name, pool, peer)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(repeats + 1):
            for name, call in calls.items():
                times[name].append(seconds(call))
            show(f"turn {turn} of {repeats}")
    num_bytes = dict.fromkeys(calls, NUM_PAGES * GROUP.page_bytes) | {"memcpy": MEMCPY_BYTES}
    return {
        name: num_bytes[name] / statistics.median(taken[1:]) / 1e9 for name, taken in times.items()
    }


def puller(name: str, pool: LocalPool, peer: Peer) -> Callable[[], None]:
    link = registry.make_reader(name, pool, SETTINGS).connect(peer.addresses[name], timeout_s=5)
    return verified_pull(link, GROUP, peer.sums, scattered_pages(1), scattered_pages(2))


def measure(options: Options) -> dict[str, float]:
    gbs = measure_pulls(REPEATS if options.quick else 3 * REPEATS)
    return {
        "shm_of_memcpy": gbs["shm"] / gbs["memcpy"],
        "tcp_of_socket": gbs["tcp"] / gbs["socket"],
        **{f"{name}_gbs": rate for name, rate in gbs.items()},
    }


if __name__ == "__main__":
    sys.exit(publish("pull", measure))
