"""A verified pull by each transport between two processes, over the least that its means allow.

T_64mib_of_floor, T_2mib_of_floor   transport T, scattered pages of 2 MiB, failure detection and
                                    verification on, over its floor of as many bytes: one memcpy
                                    (shm), a plain blocking socket (tcp, ucx), a bare NIXL transfer
                                    of the same descriptors (nixl)
…_in_256kib_pages_…                 the same with pages of 256 KiB
checksum_cost_T                     share of the pull of 64 MiB that goes away without the sums

Floor and pull take turns; each figure is the median of the ratios of pairs.
"""

import contextlib
import ctypes
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np

from benchmarks.common import Options, publish, seconds, show
from benchmarks.source_process import source_process
from benchmarks.transfer_source import (
    GROUPS,
    POOL_BYTES,
    PULL,
    SETTINGS,
    BareNixl,
    Exported,
    make_pool,
    scattered,
    serve,
)
from benchmarks.verified_pull import verified_pull
from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer import registry, shm_reader, tcp_connection
from paceline.kv_transfer.base import CellSums, LocalPool, PageIds
from paceline.kv_transfer.nixl_regions import regions_of
from paceline.kv_transfer.pool_memory import new_pool_file, size_pool_memory

Call = Callable[[], object]

TOTALS = {"64mib": 64 << 20, "2mib": 2 << 20}
PAIRS, QUICK_PAIRS = 30, 8
WARM_UP = 4  # turns: the link learns how large a piece may be


class Case:
    """So many bytes in pages of one size, from the source's scattered pages into ours."""

    def __init__(self, exported: Exported, pool: LocalPool, num_bytes: int) -> None:
        self.exported = exported
        self.pool = pool
        self.num_pages = num_bytes // pool.group.page_bytes
        self.source_pages = scattered(pool.group, self.num_pages, seed=1)
        self.pages = scattered(pool.group, self.num_pages, seed=2)
        self.sums = exported.sums[pool.group.page_bytes]

    def pull_by(self, name: str) -> Call:
        address = self.exported.addresses[self.pool.group.page_bytes][name]
        link = registry.make_reader(name, self.pool, SETTINGS).connect(address, timeout_s=10)
        return verified_pull(link, self.pool.group, self.sums, self.source_pages, self.pages)

    def floor_of(self, name: str, plain: socket.socket, nixl: BareNixl | None) -> Call:
        if name == "shm":
            return self._memcpy()
        if name != "nixl":
            return lambda: self._receive(plain)
        assert nixl is not None
        return self._bare(nixl)

    def _memcpy(self) -> Call:
        num_bytes = self.num_pages * self.pool.group.page_bytes
        ours, theirs = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        return lambda: ctypes.memmove(theirs.ctypes.data, ours.ctypes.data, num_bytes)

    def _receive(self, plain: socket.socket) -> None:
        page_bytes, memory = self.pool.group.page_bytes, self.pool.memory
        plain.sendall(PULL.pack(page_bytes, self.num_pages))
        for start in (self.pages * page_bytes).tolist():
            view = memory[start : start + page_bytes]
            while len(view):
                view = view[plain.recv_into(view, 0, socket.MSG_WAITALL) :]

    def _bare(self, nixl: BareNixl) -> Call:
        peer = nixl.add_peer(self.exported.nixl_metadata)
        group = self.pool.group
        local = regions_of(nixl.base_address, self.pages, group, None)
        remote = regions_of(self.exported.base_address, self.source_pages, group, None)
        return lambda: nixl.read(peer, local, remote)


def transports() -> list[str]:
    """Those that are installed."""
    names = [name for name in ("shm", "tcp", "ucx", "nixl") if not registry.problem_of(name)]
    show(f"transports: {', '.join(names)}")
    return names


def compare(first: Call, second: Call, num_pairs: int) -> tuple[float, float, float]:
    """Medians: of the ratio of their times, pair by pair, and of both in seconds."""
    pairs = [(seconds(first), seconds(second)) for _ in range(WARM_UP + num_pairs)][WARM_UP:]
    ratio = statistics.median(a / b for a, b in pairs)
    return ratio, *(statistics.median(times) for times in zip(*pairs, strict=True))


@contextlib.contextmanager
def without_sums(name: str, case: Case) -> Iterator[None]:
    """Pulls that copy as before, and find the promised sums without computing any."""
    source_of = dict(zip(case.pages.tolist(), case.source_pages.tolist(), strict=True))

    def promised(pages: PageIds) -> CellSums:
        return case.sums[[source_of[page] for page in pages.tolist()]]

    def sum_nothing(memory: memoryview, pages: PageIds, *rest: object) -> CellSums:
        return promised(pages)

    def only_copy(
        to: memoryview, source: memoryview, pages: PageIds, source_pages: PageIds, *rest: object
    ) -> CellSums:
        size = case.pool.group.page_bytes
        bases = [np.frombuffer(memory, np.uint8).ctypes.data for memory in (to, source)]
        for page, source_page in zip(pages.tolist(), source_pages.tolist(), strict=True):
            ctypes.memmove(bases[0] + page * size, bases[1] + source_page * size, size)
        return promised(pages)

    patches: dict[str, contextlib.AbstractContextManager[object]] = {
        "shm": mock.patch.object(shm_reader, "copy_pages", only_copy),
        "tcp": mock.patch.object(tcp_connection, "sum_pages", sum_nothing),
    }
    with patches[name]:
        yield


def checksum_cost(name: str, case: Case, num_pairs: int) -> float:
    pull = case.pull_by(name)

    def pull_without() -> None:
        with without_sums(name, case):
            pull()

    return 1 - compare(pull_without, pull, num_pairs)[0]


def key_of(name: str, total: str, group: PageGroup) -> str:
    size = "" if group.page_bytes == 2 << 20 else f"_in_{group.page_bytes >> 10}kib_pages"
    return f"{name}_{total}{size}"


def measure(options: Options) -> dict[str, float]:
    num_pairs = QUICK_PAIRS if options.quick else PAIRS
    names = transports()
    memory = size_pool_memory(new_pool_file(), POOL_BYTES)
    figures: dict[str, float] = {}
    with (
        source_process(serve, names) as exported,
        socket.create_connection(("127.0.0.1", exported.socket_port)) as plain,
    ):
        nixl = BareNixl("reader", memory.view) if "nixl" in names else None
        for group in GROUPS.values():
            pool = make_pool(group, memory.view, memory.fd)
            for total, num_bytes in TOTALS.items():
                case = Case(exported, pool, num_bytes)
                for name in names:
                    floor = case.floor_of(name, plain, nixl)
                    ratio, _, taken = compare(floor, case.pull_by(name), num_pairs)
                    key = key_of(name, total, group)
                    figures[f"{key}_of_floor"] = ratio
                    figures[f"{key}_gbs"] = num_bytes / taken / 1e9
                    show(f"{key}: {ratio:.3f} of its floor, {num_bytes / taken / 1e9:.2f} GB/s")
        case = Case(exported, make_pool(GROUPS[2 << 20], memory.view, memory.fd), 64 << 20)
        for name in ("tcp", "shm"):
            figures[f"checksum_cost_{name}"] = checksum_cost(name, case, num_pairs)
    return figures


def main() -> int:
    return publish("transfer", measure)


if __name__ == "__main__":
    sys.exit(main())
