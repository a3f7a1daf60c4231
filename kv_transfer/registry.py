"""Transports by name. Each is a module that is imported when it is first used."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import cast

from paceline.core.errors import ConfigError
from paceline.core.tls import PLAIN, TlsConfig
from paceline.kv_transfer.base import Pool, Reader, Source, Transport, TransportSettings
from paceline.kv_transfer.host import has_rdma_device

AUTO = "auto"  # all that may be of use here
LOCAL = "local"  # within one process: only where it is named
MULTI = "multi"  # what decides between several; as a setting, the same as auto


@dataclass(frozen=True, slots=True)
class Entry:
    module: str
    on_device: bool = False  # joins pools on CUDA devices; else pools in host memory
    libraries: tuple[str, ...] = ()  # any of these packages; the extra has the transport's name
    leaves_tls: bool = False  # its bytes cross the network outside of our connections


_entries = {  # best first: `auto` takes the first that both ends have
    LOCAL: Entry("paceline.kv_transfer.local"),
    "cuda_ipc": Entry("paceline.kv_transfer.cuda_ipc", on_device=True),
    "shm": Entry("paceline.kv_transfer.shm"),
    "nixl": Entry(
        "paceline.kv_transfer.nixl", libraries=("nixl_cu12", "nixl_cu13"), leaves_tls=True
    ),
    "ucx": Entry("paceline.kv_transfer.ucx", libraries=("ucxx",), leaves_tls=True),
    "tcp": Entry("paceline.kv_transfer.tcp"),
    MULTI: Entry("paceline.kv_transfer.multi"),
}


def register(name: str, module: str, *, on_device: bool = False) -> None:
    """Adds a transport: a module with what `base.Transport` lists. It becomes the last choice. It
    is taken for one whose bytes are not encrypted."""
    _entries[name] = Entry(module, on_device, leaves_tls=True)


def load(name: str) -> Transport:
    """Raises ConfigError for an unknown name, or one whose libraries are not installed."""
    ConfigError.check("transport", name, not (reason := problem_of(name)), reason)
    return cast(Transport, importlib.import_module(_entries[name].module))


def problem_of(name: str, on_device: bool | None = None) -> str:
    """Why a transport cannot be had, for a pool that is on a device or not; empty when it can."""
    if name not in _entries:
        return f"must be one of {', '.join((*_entries, AUTO))}"
    if on_device is not None and _entries[name].on_device != on_device:
        return "needs a pool in host memory" if on_device else "needs a pool on a CUDA device"
    libraries = _entries[name].libraries
    if libraries and not any(find_spec(library) for library in libraries):
        return f"needs {libraries[0]}, which is not installed: pip install 'paceline[{name}]'"
    try:
        importlib.import_module(_entries[name].module)
    except ImportError as error:
        return f"cannot be loaded: {error}"
    return ""


def make_source(name: str, pool: Pool, settings: TransportSettings) -> Source:
    return load(name).make_source(pool, settings)


def make_reader(name: str, pool: Pool, settings: TransportSettings) -> Reader:
    return load(name).make_reader(pool, settings)


def between_processes() -> list[str]:
    """All that connect two processes, best first."""
    return [name for name in _entries if name not in (LOCAL, MULTI)]


def why_confined(name: str, tls: TlsConfig) -> str:
    """Why a transport is refused where encryption is required; empty when it is not."""
    if not (tls.confines and _entries[name].leaves_tls):
        return ""
    return "moves KV outside of TLS: set tls_fabric_encrypted if the network encrypts, or leave it"


def names_of(
    transports: Sequence[str], *, on_device: bool = False, tls: TlsConfig = PLAIN
) -> list[str]:
    """The transports that a setting names, best first; `auto` and `multi` stand for all between
    processes that fit the pool, are of use on this host and may be used with `tls`."""
    names: list[str] = []
    for transport in transports:
        if transport in (AUTO, MULTI):
            names += (
                name
                for name in between_processes()
                if _is_of_use(name, on_device) and not why_confined(name, tls)
            )
        else:
            load(transport)
            names.append(transport)
    return list(dict.fromkeys(names))


def _is_of_use(name: str, on_device: bool) -> bool:
    """Libraries earn their memory and start-up time where there is RDMA; else tcp is faster."""
    entry = _entries[name]
    if entry.libraries and not (has_rdma_device() and not problem_of(name)):
        return False
    return entry.on_device == on_device


def why_not(name: str, offered: Mapping[str, bytes]) -> str:
    """Why a peer that offers these addresses cannot be reached by `name`; empty: worth a try."""
    if name not in offered:
        return f"the source offers only {', '.join(offered) or 'none'}"
    return load(name).why_unreachable(offered[name])
