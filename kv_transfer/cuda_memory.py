"""Memory of a CUDA device that several processes map: one allocation, shared by a descriptor.

Whoever maps it keeps it alive: it is freed when the last process that maps it, or holds a
descriptor of it, has let go or died. It has no name, so nothing is left behind after a kill -9.
"""

import os
import weakref
from dataclasses import dataclass

import torch

from paceline.kv_transfer import cuda_driver


class _Span:
    """What torch needs to make a tensor of bytes over memory that it has not allocated."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The mapping ends with the last tensor on it. `fd` is open until it is closed."""

    fd: int
    bytes: torch.Tensor  # uint8 [num_bytes]

    def close(self) -> None:
        os.close(self.fd)


def new_device_memory(num_bytes: int, device: torch.device) -> DeviceMemory:
    """Zeroed, of at least `num_bytes`: whole granules. Raises DriverError."""
    index = index_of(device)
    granule = cuda_driver.granularity(index)
    num_bytes = -(-num_bytes // granule) * granule
    handle = cuda_driver.create(num_bytes, index)
    try:
        values = _map(handle, num_bytes, device, writable=True)
        return DeviceMemory(cuda_driver.export(handle), values.zero_())
    finally:
        cuda_driver.release(handle)


def map_device_memory(fd: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A view of another process's allocation, to be read by `device`: uint8 [num_bytes].

    The descriptor can be closed afterwards. Raises DriverError.
    """
    handle = cuda_driver.import_(fd)
    try:
        return _map(handle, num_bytes, device, writable=False)
    finally:
        cuda_driver.release(handle)


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _map(handle: int, num_bytes: int, device: torch.device, *, writable: bool) -> torch.Tensor:
    torch.cuda.current_stream(device).query()  # this thread's first call may be to the driver
    index = index_of(device)
    address = cuda_driver.map_(handle, num_bytes, index, writable=writable)
    span = _Span(address, num_bytes)
    unmap = weakref.finalize(span, cuda_driver.unmap, address, num_bytes)
    unmap.atexit = False
    # On the device that has the memory: for another one torch would copy it.
    return torch.as_tensor(span, device=torch.device("cuda", cuda_driver.device_of(address)))
