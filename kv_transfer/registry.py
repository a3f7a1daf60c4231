"""Transports by name. Each is a module that is imported when it is first used."""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from paceline.core.errors import ConfigError
from paceline.kv_transfer.base import Pool, Reader, Source, Transport, TransportSettings

AUTO = "auto"
LOCAL = "local"  # within one process: only where it is named


@dataclass(frozen=True, slots=True)
class Entry:
    module: str
    on_device: bool = False  # joins pools on CUDA devices; else pools in host memory


_entries = {  # best first: `auto` takes the first that both ends have
    LOCAL: Entry("paceline.kv_transfer.local"),
    "cuda_ipc": Entry("paceline.kv_transfer.cuda_ipc", on_device=True),
    "shm": Entry("paceline.kv_transfer.shm"),
    "tcp": Entry("paceline.kv_transfer.tcp"),
}


def register(name: str, module: str, *, on_device: bool = False) -> None:
    """Adds a transport: a module with what `base.Transport` lists. It becomes the last choice."""
    _entries[name] = Entry(module, on_device)


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
    """Best first."""
    return [name for name in _entries if name != LOCAL]


def names_of(transports: Sequence[str], *, on_device: bool = False) -> list[str]:
    """The transports that a setting names, best first; `auto` stands for all between processes
    that fit the pool."""
    names: list[str] = []
    for transport in transports:
        if transport == AUTO:
            names += (n for n in between_processes() if _entries[n].on_device == on_device)
        else:
            load(transport)
            names.append(transport)
    return list(dict.fromkeys(names))


def why_not(name: str, offered: Mapping[str, bytes]) -> str:
    """Why a peer that offers these addresses cannot be reached by `name`; empty: worth a try."""
    if name not in offered:
        return f"the source offers only {', '.join(offered) or 'none'}"
    return load(name).why_unreachable(offered[name])
