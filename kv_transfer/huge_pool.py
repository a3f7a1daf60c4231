"""Huge pages for a pool: where it is mapped, and how it comes to lie on them while it is used.

Attention that reads KV from 4 KiB pages waits for address translation: it takes a fifteenth to a
quarter longer (docs/performance.md). Files in memory are seldom given others, but Linux 6.1 and
later gather them in place for whoever asks by MADV_COLLAPSE, in 1.6 s of CPU time a GiB. Readers
and writers in other processes go on meanwhile; no page is added that was not there.
"""

import ctypes
import errno
import mmap
import os
import threading
import time

import numpy as np
import structlog

HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25  # linux/mman.h, since 6.1; not in Python 3.11
_MAP_FIXED = 0x10
# Whoever touches the huge page that is being made waits for it, 2 to 4 ms. So the thread has the
# priority of all others, lest it be held up amid one, and rests between them: a quarter of a core.
_REST = 3.0
_MAX_REFUSED = 8  # in a row: memory is too scattered, and looking through it costs time

_log = structlog.get_logger("paceline.kv_transfer")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_aligned(fd: int, num_bytes: int, protection: int) -> memoryview:
    """The start of a file, shared, at a multiple of 2 MiB if that can be had: elsewhere huge pages
    of the file are mapped in small pieces. The mapping ends with the last view on it."""
    try:
        room = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE)
    except OSError:  # the address space is limited
        return memoryview(mmap.mmap(fd, num_bytes, prot=protection))
    view = memoryview(room)
    first = -address_of(view) % HUGE_PAGE_BYTES
    place, flags = address_of(view) + first, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(place, num_bytes, protection, flags, fd, 0) != place:
        raise _failure()
    view = view[first : first + num_bytes]  # of `room`, which unmaps all of it at its end
    return view if protection & mmap.PROT_WRITE else view.toreadonly()


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def advise(address: int, num_bytes: int, advice: int) -> None:
    """madvise, during which other threads run. Raises OSError."""
    if _libc.madvise(address, num_bytes, advice):
        raise _failure()


def _failure() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


class HugePages:
    """A thread that gathers a pool on huge pages, a page at a time, as far as the kernel can; the
    log says how far. `memory` is populated, and the thread holds it until it ends."""

    def __init__(self, memory: memoryview) -> None:
        self.num_gathered = 0
        self._num_pages = len(memory) // HUGE_PAGE_BYTES
        self.is_stopping = threading.Event()
        args = (memory, address_of(memory))
        self._thread = threading.Thread(target=self._run, args=args, name="huge-pages", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Until all is done that can be."""
        self._thread.join()

    def stop(self) -> None:
        """Waits for the page that is being made, a few milliseconds."""
        self.is_stopping.set()
        self._thread.join()

    def _run(self, memory: memoryview, address: int) -> None:
        began_s, num_refused = time.monotonic(), 0
        for page in range(self._num_pages):
            took_s, code = self._gather(address + page * HUGE_PAGE_BYTES)
            num_refused = num_refused + 1 if code else 0
            if code == errno.EINVAL or num_refused == _MAX_REFUSED:
                break
            if self.is_stopping.wait(_REST * took_s):
                return
        _log.info(
            "the page pool lies on huge pages",
            mib=self.num_gathered * HUGE_PAGE_BYTES >> 20,
            of_mib=self._num_pages * HUGE_PAGE_BYTES >> 20,
            seconds=round(time.monotonic() - began_s, 1),
        )

    def _gather(self, address: int) -> tuple[float, int]:
        """One page: the CPU time that it took, in seconds, and the error. EAGAIN: somebody holds
        a part of it. ENOMEM: free memory is too scattered. EINVAL: the kernel cannot do it."""
        began_s, code = time.thread_time(), 0
        try:
            advise(address, HUGE_PAGE_BYTES, MADV_COLLAPSE)
            self.num_gathered += 1
        except OSError as error:
            code = error.errno or errno.EINVAL
        return time.thread_time() - began_s, code
