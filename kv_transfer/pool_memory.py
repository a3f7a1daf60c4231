"""Memory of a page pool that other processes can map: an anonymous file (memfd).

Its owner creates it, hands the descriptor to its other writers, and seals it: from then on it can
neither change its size nor be mapped writable. It has no name: nothing is left after kill -9.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.host_memory import available_bytes

_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; not in Python 3.11
_MADV_POPULATE_READ = 22  # linux/mman.h, since 5.14; not in Python 3.11
_MADV_POPULATE_WRITE = 23
_SPARE_BYTES = 64 << 20  # not to be given to a pool: whoever fills a machine to the brim is killed
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """`view` is writable bytes, page 0 first. The memory lives while a view or descriptor does."""

    fd: int
    view: memoryview

    def close(self) -> None:
        """Closes the descriptor. The mapping ends with the last view on it."""
        os.close(self.fd)


def new_pool_file() -> int:
    """A descriptor without memory; it is inherited only where it is passed on by name."""
    return os.memfd_create("paceline-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def size_pool_memory(fd: int, num_bytes: int) -> PoolMemory:
    """A zeroed pool of fixed size in a new file, all of it there, so that no copy faults later.

    Raises ConfigError when the machine has not enough memory.
    """
    _check_available(num_bytes)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        mapping = _map_writable(fd, num_bytes)
        _populate(mapping)
    except (OSError, ValueError) as error:  # ValueError: no bytes at all
        cause = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        reason = f"memory for the page pool cannot be had: {cause}"
        raise ConfigError("pool_mib", _mib(num_bytes), reason) from None
    return PoolMemory(fd, memoryview(mapping))


def open_pool_memory(fd: int) -> PoolMemory:
    """Another writer's view of an inherited descriptor, which it then owns.

    Blocks for about 60 ms a GiB: its page table is filled here, so that no pull faults later.
    """
    mapping = _map_writable(fd, os.fstat(fd).st_size)
    with contextlib.suppress(OSError):  # an older kernel
        mapping.madvise(_MADV_POPULATE_WRITE)
    return PoolMemory(fd, memoryview(mapping))


def seal_pool_memory(fd: int) -> None:
    """Call once all writers have mapped it: later mappings are read-only."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)


def map_read_only(fd: int) -> memoryview:
    """A reader's view of a pool. The descriptor can be closed afterwards."""
    size = os.fstat(fd).st_size
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    for advice in (mmap.MADV_HUGEPAGE, _MADV_POPULATE_READ):
        with contextlib.suppress(OSError):  # an older kernel
            mapping.madvise(advice)  # measured: without, the first pull takes 1.7 times as long
    return memoryview(mapping)


def has_fixed_size(fd: int) -> bool:
    """Whether nobody can shrink it under a mapping (which would kill the reader by SIGBUS)."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS == _SIZE_SEALS
    except OSError:
        return False


def _check_available(num_bytes: int) -> None:
    """Under overcommit the kernel would promise anything, and kill us when we fill it."""
    available = available_bytes()
    if available is not None and num_bytes > available - _SPARE_BYTES:
        reason = f"memory for the page pool cannot be had: {available >> 20} MiB are available"
        raise ConfigError("pool_mib", _mib(num_bytes), reason)


def _mib(num_bytes: int) -> int:
    """As it was set: a pool of whole pages may be a little smaller."""
    return -(-num_bytes >> 20)


def _map_writable(fd: int, num_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, num_bytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory
        mapping.madvise(mmap.MADV_HUGEPAGE)  # measured: verified copy 10 % faster
    return mapping


def _populate(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel: pages come with their first use
            raise
