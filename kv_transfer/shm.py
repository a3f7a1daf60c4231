"""Transport `shm`: processes of one host and one user share the pool's memory.

The reader maps the pool, whose descriptor it gets opened for reading, and copies by itself: a
source that is merely stopped does not hold it up.

Only a memfd that cannot shrink is mapped; otherwise a source could kill its readers by SIGBUS.
"""

import os

from paceline.core.errors import ConfigError
from paceline.kv_transfer.base import Pool, TransportSettings, host_pool
from paceline.kv_transfer.descriptor_reader import why_unreachable
from paceline.kv_transfer.descriptor_source import DescriptorSource
from paceline.kv_transfer.pool_memory import has_fixed_size
from paceline.kv_transfer.shm_reader import ShmReader

__all__ = ["make_reader", "make_source", "why_unreachable"]


def make_source(pool: Pool, settings: TransportSettings) -> DescriptorSource:
    fd = host_pool(pool, "shm").fd
    if fd < 0 or not has_fixed_size(fd):
        raise ConfigError("transport", "shm", "needs a pool in a memfd of sealed size")
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    num_bytes = os.fstat(fd).st_size
    return DescriptorSource("shm", pool, settings.incarnation, read_only, num_bytes)


def make_reader(pool: Pool, settings: TransportSettings) -> ShmReader:
    return ShmReader(host_pool(pool, "shm"))
