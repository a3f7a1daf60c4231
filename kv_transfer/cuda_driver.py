"""The calls of the CUDA driver that make memory of a device which other processes can map.

torch has none for them. All are typed here once; a call that fails raises DriverError.
"""

import ctypes
import functools
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY

_LIBRARY = "libcuda.so.1"
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ, _READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_*
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class DriverError(Exception):
    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text}")
        self.code = code


class _Location(ctypes.Structure):
    _fields_ = (("kind", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("kind", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32_data", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuPointerGetAttribute": (POINTER(c_int), c_int, c_uint64),
}


def granularity(device: int) -> int:
    """Allocations are multiples of it."""
    size = c_size_t()
    _call("cuMemGetAllocationGranularity", byref(size), byref(_properties(device)), _MINIMUM)
    return size.value


def create(num_bytes: int, device: int) -> int:
    """Memory that can be exported, not mapped yet. Its handle."""
    handle = c_uint64()
    _call("cuMemCreate", byref(handle), num_bytes, byref(_properties(device)), 0)
    return handle.value


def export(handle: int) -> int:
    """A file descriptor that another process can `import_`. It keeps the memory alive."""
    descriptor = c_int()
    _call("cuMemExportToShareableHandle", byref(descriptor), handle, _FILE_DESCRIPTOR, 0)
    return descriptor.value


def import_(descriptor: int) -> int:
    """A handle to what a descriptor stands for. The descriptor can be closed afterwards."""
    handle = c_uint64()
    _call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), _FILE_DESCRIPTOR)
    return handle.value


def release(handle: int) -> None:
    """The memory lives on while it is mapped somewhere, or a descriptor of it is open."""
    _call("cuMemRelease", handle)


def map_(handle: int, num_bytes: int, device: int, *, writable: bool) -> int:
    """The address at which `device` sees the memory."""
    address = c_uint64()
    _call("cuMemAddressReserve", byref(address), num_bytes, 0, 0, 0)
    try:
        _call("cuMemMap", address.value, num_bytes, 0, handle, 0)
        try:
            flags = _READ_WRITE if writable else _READ
            access = _Access(_Location(_DEVICE, device), flags)
            _call("cuMemSetAccess", address.value, num_bytes, byref(access), 1)
        except DriverError:
            _call("cuMemUnmap", address.value, num_bytes)
            raise
    except DriverError:
        _call("cuMemAddressFree", address.value, num_bytes)
        raise
    return address.value


def unmap(address: int, num_bytes: int) -> None:
    """Nothing may read or write there any more."""
    _call("cuMemUnmap", address, num_bytes)
    _call("cuMemAddressFree", address, num_bytes)


def device_of(address: int) -> int:
    """Where the memory behind an address lies, which may not be the device that reads it."""
    ordinal = c_int()
    _call("cuPointerGetAttribute", byref(ordinal), _DEVICE_ORDINAL, address)
    return ordinal.value


def _properties(device: int) -> _Properties:
    return _Properties(_PINNED, _FILE_DESCRIPTOR, _Location(_DEVICE, device))


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DriverError(_LIBRARY, -1, str(error)) from None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    code = library.cuInit(0)
    if code:
        raise DriverError("cuInit", code, _text(library, code))
    return library


def _call(name: str, *arguments: object) -> None:
    library = _library()
    code = getattr(library, name)(*arguments)
    if code:
        raise DriverError(name, code, _text(library, code))


def _text(library: ctypes.CDLL, code: int) -> str:
    text = c_char_p()
    library.cuGetErrorString(code, byref(text))
    return text.value.decode() if text.value else f"error {code}"
