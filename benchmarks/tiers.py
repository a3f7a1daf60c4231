"""Tiers against what the machine can do: pages down into a tier and back into the pool, verified.

host_tier_of_memcpy: the slower way over one 64 MiB memcpy.
file_tier_of_disk: both ways together, over a sequential O_DIRECT write of a new file with the same
bytes, in the same file system, and a read of it.
file_tier_of_overwrite: the same over a write in place, which allocates nothing; nor does a full
tier. The fastest turn of each counts: the tier needs the processor and memory, the disk neither, so
that other work on the machine would count against one of them only.
The geometry is SmolLM2-135M in float32: 256 pages of 720 KiB, scattered in the pool.
"""

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.common import MEMCPY_BYTES, REPEATS, Memcpy, Options, publish, seconds, show
from benchmarks.pull import GROUP, NUM_PAGES, make_pool, scattered_pages
from paceline.kernels.pages import sum_pages
from paceline.kv_transfer.tiers.base import Nobody, PageBatch, PageName, Tier
from paceline.kv_transfer.tiers.config import FileTierConfig, PageShape
from paceline.kv_transfer.tiers.host import HostTier
from paceline.kv_transfer.tiers.segment_format import aligned, new_buffer
from paceline.kv_transfer.tiers.stack import TierStack
from paceline.worker.main import SWITCH_INTERVAL_S

NUM_BYTES = NUM_PAGES * GROUP.page_bytes
CHUNK_BYTES = 8 << 20  # of the plain write and read
FILE_TIER_MIB = (NUM_BYTES >> 20) + 32  # every turn takes the place of the one before
BATCH_PAGES = 32  # as a worker offloads
FILL_PAGES = 64  # as a worker fills


class Pages:
    """A pool of random bytes, one to fill, and names that are new every turn."""

    def __init__(self) -> None:
        self.source, self.pool = make_pool(), make_pool()
        random = np.random.default_rng(0).bytes(len(self.source.memory))
        np.frombuffer(self.source.memory, np.uint8)[:] = np.frombuffer(random, np.uint8)
        self.sums = sum_pages(self.source.memory, np.arange(NUM_PAGES), GROUP)
        self.turn = 0

    def names(self) -> list[PageName]:
        return [PageName(f"{self.turn:016}{page:016}".encode(), 0) for page in range(NUM_PAGES)]

    def put(self, tier: Tier) -> None:
        names, pages = self.names(), scattered_pages(1)
        for start in range(0, NUM_PAGES, BATCH_PAGES):
            chosen = pages[start : start + BATCH_PAGES]
            part = names[start : start + BATCH_PAGES]
            wrong = tier.put(PageBatch(part, self.source.memory, chosen, self.sums[chosen]), 60)
            assert not len(wrong)

    def pull(self, stack: TierStack) -> None:
        names, pages = self.names(), scattered_pages(2)
        for start in range(0, NUM_PAGES, FILL_PAGES):
            part = names[start : start + FILL_PAGES]
            to = pages[start : start + FILL_PAGES]
            came = stack.pull(part, self.pool, to, time.monotonic() + 60, threading.Event())
            assert len(came) == len(part)


def measure_host(pages: Pages, repeats: int) -> dict[str, float]:
    """GB/s, medians; the ways take turns so that noise hits all alike."""
    tier = HostTier("host", GROUP, NUM_PAGES, "lru")
    stack = TierStack([tier], Nobody())
    memcpy = Memcpy()
    times: dict[str, list[float]] = {"memcpy": [], "host_put": [], "host_pull": []}
    for _ in range(repeats + 1):
        pages.turn += 1
        times["memcpy"].append(seconds(memcpy))
        times["host_put"].append(seconds(lambda: pages.put(tier)))
        times["host_pull"].append(seconds(lambda: pages.pull(stack)))
    num_bytes = dict.fromkeys(times, NUM_BYTES) | {"memcpy": MEMCPY_BYTES}
    medians = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    return {name: num_bytes[name] / medians[name] / 1e9 for name in times}


def measure_file(pages: Pages, repeats: int, folder: Path) -> dict[str, float]:
    """Seconds for NUM_BYTES, of the fastest turns."""
    config = FileTierConfig(path=str(folder / "tier"), capacity_mib=FILE_TIER_MIB)
    ways = ("write", "overwrite", "read", "file_put", "file_pull")
    times: dict[str, list[float]] = {way: [] for way in ways}

    def open_stack() -> TierStack:
        return TierStack([config.make("tier", PageShape(GROUP, "benchmark"))], Nobody())

    plain = folder / "plain"
    for turn in range(repeats + 1):
        pages.turn += 1
        times["write"].append(seconds(lambda: write_plainly(plain, os.O_CREAT)))
        times["overwrite"].append(seconds(lambda: write_plainly(plain)))
        times["read"].append(seconds(lambda: read_plainly(plain)))
        plain.unlink()
        times["file_put"].append(put_through(pages, open_stack()))
        times["file_pull"].append(pull_from(pages, open_stack()))
        show(f"turn {turn} of {repeats}")
    return {name: min(taken[1:]) for name, taken in times.items()}


def put_through(pages: Pages, stack: TierStack) -> float:
    """Until all is in the file system."""

    def put_and_close() -> None:
        pages.put(stack.tiers[0])
        stack.close()

    return seconds(put_and_close)


def pull_from(pages: Pages, stack: TierStack) -> float:
    """When its speed is known, and with it how much fits into a piece."""
    pages.pull(stack)
    taken = seconds(lambda: pages.pull(stack))
    stack.close()
    return taken


def write_plainly(path: Path, flags: int = 0) -> None:
    _in_chunks(path, os.O_WRONLY | flags, os.pwrite)


def read_plainly(path: Path) -> None:
    def read(fd: int, chunk: memoryview, offset: int) -> int:
        return os.preadv(fd, [chunk], offset)

    _in_chunks(path, os.O_RDONLY, read)


def _in_chunks(path: Path, flags: int, call: Callable[[int, memoryview, int], int]) -> None:
    buffer, size = _BUFFER, aligned(NUM_BYTES)
    fd = os.open(path, flags | os.O_DIRECT, 0o600)
    try:
        for offset in range(0, size, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, size - offset)]
            assert call(fd, chunk, offset) == len(chunk)
    finally:
        os.close(fd)


_BUFFER = new_buffer(CHUNK_BYTES)


def measure(options: Options) -> dict[str, float]:
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as in the process that holds the tiers
    repeats = REPEATS if options.quick else 3 * REPEATS
    pages = Pages()
    gbs = measure_host(pages, repeats)
    with tempfile.TemporaryDirectory(prefix="paceline-tiers-") as folder:
        taken = measure_file(pages, repeats, Path(folder))
    tier_s = taken["file_put"] + taken["file_pull"]
    return {
        "host_tier_of_memcpy": min(gbs["host_put"], gbs["host_pull"]) / gbs["memcpy"],
        "file_tier_of_disk": (taken["write"] + taken["read"]) / tier_s,
        "file_tier_of_overwrite": (taken["overwrite"] + taken["read"]) / tier_s,
        "file_put_of_write": taken["write"] / taken["file_put"],
        "file_pull_of_read": taken["read"] / taken["file_pull"],
        **{f"{name}_gbs": rate for name, rate in gbs.items()},
        **{
            f"disk_{way}_gbs": NUM_BYTES / taken[way] / 1e9
            for way in ("write", "overwrite", "read")
        },
    }


def main() -> int:
    return publish("tiers", measure)


if __name__ == "__main__":
    sys.exit(main())
