"""Transports by name. Each is a module that is imported when it is first used."""

import importlib
from collections.abc import Mapping, Sequence
from typing import cast

from paceline.core.errors import ConfigError
from paceline.kv_transfer.base import LocalPool, Reader, Source, Transport, TransportSettings

AUTO = "auto"
LOCAL = "local"  # within one process: only where it is named
_modules = {  # best first: `auto` takes the first that both ends have
    LOCAL: "paceline.kv_transfer.local",
    "shm": "paceline.kv_transfer.shm",
    "tcp": "paceline.kv_transfer.tcp",
}


def register(name: str, module: str) -> None:
    """Adds a transport: a module with what `base.Transport` lists. It becomes the last choice."""
    _modules[name] = module


def load(name: str) -> Transport:
    """Raises ConfigError for an unknown name, or one whose libraries are not installed."""
    ConfigError.check("transport", name, not (reason := problem_of(name)), reason)
    return cast(Transport, importlib.import_module(_modules[name]))


def problem_of(name: str) -> str:
    """Why a transport cannot be had; empty when it can."""
    if name not in _modules:
        return f"must be one of {', '.join((*_modules, AUTO))}"
    try:
        importlib.import_module(_modules[name])
    except ImportError as error:
        return f"cannot be loaded: {error}"
    return ""


def make_source(name: str, pool: LocalPool, settings: TransportSettings) -> Source:
    return load(name).make_source(pool, settings)


def make_reader(name: str, pool: LocalPool, settings: TransportSettings) -> Reader:
    return load(name).make_reader(pool, settings)


def names_of(transports: Sequence[str]) -> list[str]:
    """The transports that a setting names, best first; `auto` stands for all between processes."""
    names: list[str] = []
    for transport in transports:
        if transport == AUTO:
            names += (name for name in _modules if name != LOCAL)
        else:
            load(transport)
            names.append(transport)
    return list(dict.fromkeys(names))


def why_not(name: str, offered: Mapping[str, bytes]) -> str:
    """Why a peer that offers these addresses cannot be reached by `name`; empty: worth a try."""
    if name not in offered:
        return f"the source offers only {', '.join(offered) or 'none'}"
    return load(name).why_unreachable(offered[name])
