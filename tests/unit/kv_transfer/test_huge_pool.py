"""A pool on huge pages: where it is mapped, and how it comes to lie there while it is used."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from paceline.kv_transfer import huge_pool
from paceline.kv_transfer.huge_pool import HUGE_PAGE_BYTES, HugePages, address_of
from paceline.kv_transfer.pool_memory import (
    PoolMemory,
    map_read_only,
    new_pool_file,
    open_pool_memory,
    seal_pool_memory,
    size_pool_memory,
)

NUM_PAGES = 4
NUM_BYTES = NUM_PAGES * HUGE_PAGE_BYTES + 4096  # the rest is no huge page


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    made = size_pool_memory(new_pool_file(), NUM_BYTES)
    yield made
    made.close()


def words(memory: memoryview) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    return np.frombuffer(memory, np.uint64)


def num_mapped_huge(memory: memoryview) -> int:
    """Bytes of our mapping that one entry of a page table covers 2 MiB of."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    start = f"{address_of(memory):x}-"
    next(line for line in lines if line.startswith(start))
    return int(next(line for line in lines if line.startswith("ShmemPmdMapped:")).split()[1]) << 10


class Kernel:
    """Answers calls of madvise with `codes` in turn, then with the last one; 0 is success."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)
        self.num_calls = 0
        self.is_called = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def advise(self, address: int, num_bytes: int, advice: int) -> None:
        assert (num_bytes, advice) == (HUGE_PAGE_BYTES, huge_pool.MADV_COLLAPSE)
        self.num_calls += 1
        self.is_called.set()
        self.may_answer.wait()
        code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        if code:
            raise OSError(code, os.strerror(code))


def gather(memory: memoryview) -> tuple[int, dict[str, object]]:
    """How many huge pages it has got, and what the log says."""
    huge_pages = HugePages(memory)
    with capture_logs() as logs:
        huge_pages.start()
        huge_pages.wait()
    (entry,) = logs
    return huge_pages.num_gathered, dict(entry)


def test_all_views_of_a_pool_begin_at_a_huge_page(pool: PoolMemory) -> None:
    """Also readers' in other processes: the kernel maps a huge page as one only there."""
    writer = open_pool_memory(os.dup(pool.fd))
    seal_pool_memory(pool.fd)
    reader = map_read_only(pool.fd)
    for view in (pool.view, writer.view, reader):
        assert address_of(view) % HUGE_PAGE_BYTES == 0
        assert len(view) == NUM_BYTES
    assert reader.readonly
    writer.close()


def test_its_content_is_the_same_for_all_who_use_it_meanwhile(pool: PoolMemory) -> None:
    writer = open_pool_memory(os.dup(pool.fd))
    seal_pool_memory(pool.fd)
    reader = map_read_only(pool.fd)
    words(pool.view)[:] = np.arange(NUM_BYTES // 8)
    before = num_mapped_huge(pool.view)
    num_gathered, entry = gather(pool.view)
    words(writer.view)[::512] += 1
    expected = np.arange(NUM_BYTES // 8, dtype=np.uint64)
    expected[::512] += 1
    for view in (pool.view, writer.view, reader):
        assert (words(view) == expected).all()
    assert entry["mib"] == 2 * num_gathered
    assert entry["of_mib"] == 2 * NUM_PAGES
    if num_gathered > 0:  # this kernel can do it
        assert num_mapped_huge(pool.view) > before
    writer.close()


def test_writes_while_pages_are_gathered_are_kept(pool: PoolMemory) -> None:
    writer, is_done, num_rounds = open_pool_memory(os.dup(pool.fd)), threading.Event(), 0

    def write() -> None:
        nonlocal num_rounds
        while not is_done.is_set() or num_rounds == 0:
            words(writer.view)[::512] += 1  # one word of each ordinary page
            num_rounds += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        gather(pool.view)
    finally:
        is_done.set()
        thread.join()
    assert (words(pool.view)[::512] == num_rounds).all()
    assert words(pool.view).sum() == num_rounds * len(words(pool.view)[::512])
    writer.close()


def test_a_stop_waits_for_one_page_and_lets_the_memory_go(
    pool: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(0)
    kernel.may_answer.clear()
    monkeypatch.setattr(huge_pool, "advise", kernel.advise)
    huge_pages = HugePages(pool.view)
    huge_pages.start()
    kernel.is_called.wait()
    stopping = threading.Thread(target=huge_pages.stop)
    stopping.start()
    assert stopping.is_alive()
    huge_pages.is_stopping.wait()
    kernel.may_answer.set()
    stopping.join()
    assert kernel.num_calls == huge_pages.num_gathered == 1
    start = f"{address_of(pool.view):x}-"
    assert start in Path("/proc/self/maps").read_text()
    pool.view.release()
    assert start not in Path("/proc/self/maps").read_text()


def test_a_kernel_that_cannot_is_asked_once(
    pool: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(errno.EINVAL)
    monkeypatch.setattr(huge_pool, "advise", kernel.advise)
    num_gathered, entry = gather(pool.view)
    assert (num_gathered, kernel.num_calls) == (0, 1)
    assert (entry["mib"], entry["of_mib"]) == (0, 2 * NUM_PAGES)


def test_memory_that_is_too_scattered_is_not_looked_through_for_ever(
    pool: PoolMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pool, "_MAX_REFUSED", 2)
    kernel = Kernel(0, errno.ENOMEM)
    monkeypatch.setattr(huge_pool, "advise", kernel.advise)
    num_gathered, _ = gather(pool.view)
    assert (num_gathered, kernel.num_calls) == (1, 3)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM])
def test_a_page_that_cannot_be_moved_stays_as_it_is(
    pool: PoolMemory, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Somebody holds a part of it, or there was no free huge page just then."""
    monkeypatch.setattr(huge_pool, "advise", Kernel(0, code, 0).advise)
    num_gathered, _ = gather(pool.view)
    assert num_gathered == NUM_PAGES - 1


def test_a_pool_smaller_than_a_huge_page_has_none() -> None:
    small = size_pool_memory(new_pool_file(), 4096)
    num_gathered, _ = gather(small.view)
    assert num_gathered == 0
    small.close()
