"""Transport `cuda_ipc`: processes of one host and one user map each other's pools on devices.

A pool is one allocation that the driver exports as a file descriptor, handed over as shm hands
over its own. The reader maps it for reading and gathers pages by itself: one kernel a piece, on a
stream of its own, which sums the bytes that it stores. A source that is merely stopped does not
hold it up, and the memory of one that was killed stays mapped until its readers let go of it, so
a kernel that reads it meanwhile ends without a fault: docs/transports.md.

Processes without torch may import this module; what copies is loaded where it is made.
"""

import os
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.kv_transfer.base import Pool, TransportSettings, device_pool
from paceline.kv_transfer.descriptor_reader import why_unreachable
from paceline.kv_transfer.descriptor_source import DescriptorSource

if TYPE_CHECKING:
    from paceline.kv_transfer.cuda_ipc_reader import CudaIpcReader

__all__ = ["make_reader", "make_source", "why_unreachable"]

NAME = "cuda_ipc"


def make_source(pool: Pool, settings: TransportSettings) -> DescriptorSource:
    own = device_pool(pool, NAME)
    if own.fd < 0:
        raise ConfigError("transport", NAME, "needs a pool in memory that the driver exports")
    fd = os.dup(own.fd)
    return DescriptorSource(NAME, own, settings.incarnation, fd, own.memory.nbytes)


def make_reader(pool: Pool, settings: TransportSettings) -> "CudaIpcReader":
    from paceline.kv_transfer.cuda_ipc_reader import CudaIpcReader

    return CudaIpcReader(device_pool(pool, NAME))
