"""Transports by name. Each is a module that is imported when it is first used."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from paceline.core.errors import ConfigError, IncompatiblePeer
from paceline.kv_transfer.base import LocalPool, Reader, Source, Transport, TransportSettings

AUTO = "auto"
_modules = {  # best first: `auto` takes the first that both ends have
    "local": "paceline.kv_transfer.local",
    "shm": "paceline.kv_transfer.shm",
    "tcp": "paceline.kv_transfer.tcp",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport for one peer, and why better ones were passed over (`name: reason`)."""

    name: str
    address: bytes
    passed_over: tuple[str, ...]


def register(name: str, module: str) -> None:
    """Adds a transport: a module with what `base.Transport` lists. It becomes the last choice."""
    _modules[name] = module


def known_transports() -> tuple[str, ...]:
    return tuple(_modules)


def load(name: str) -> Transport:
    """Raises ConfigError for an unknown name, or one whose libraries are not installed."""
    if name not in _modules:
        raise ConfigError("transport", name, f"must be one of {', '.join((*_modules, AUTO))}")
    try:
        return cast(Transport, importlib.import_module(_modules[name]))
    except ImportError as error:
        raise ConfigError("transport", name, f"cannot be loaded: {error}") from error


def make_source(name: str, pool: LocalPool, settings: TransportSettings) -> Source:
    return load(name).make_source(pool, settings)


def make_reader(name: str, pool: LocalPool, settings: TransportSettings) -> Reader:
    return load(name).make_reader(pool, settings)


def source_names(transport: str) -> tuple[str, ...]:
    """Transports that a worker set to `transport` exports its pool by."""
    if transport != AUTO:
        load(transport)
        return (transport,)
    return tuple(name for name in _modules if name != "local")


def choose(transport: str, offered: Mapping[str, bytes]) -> Choice:
    """How to reach a peer that offers these addresses, by our setting `transport`.

    Raises IncompatiblePeer, with the reason for each transport, when there is no way.
    """
    reasons: list[str] = []
    for name in _modules if transport == AUTO else (transport,):
        reason = _why_not(name, offered)
        if not reason:
            return Choice(name, offered[name], tuple(reasons))
        reasons.append(f"{name}: {reason}")
    raise IncompatiblePeer("no common transport: " + "; ".join(reasons), field="transport")


def _why_not(name: str, offered: Mapping[str, bytes]) -> str:
    if name not in offered:
        load(name)
        return f"the source offers only {', '.join(offered) or 'none'}"
    return load(name).why_unreachable(offered[name])
