"""Which host this is, and what it has."""

import functools
import os
from pathlib import Path


@functools.cache
def host_identity() -> str:
    """Processes with equal identity can share memory and sockets: the kernel's boot, and the
    network namespace, in which abstract unix sockets live."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}:{os.stat('/proc/self/ns/net').st_ino}"


def has_rdma_device() -> bool:
    """InfiniBand or RoCE, as the kernel lists it."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())
