"""The tcp transport with certificates, as a transport of its own for the contract suite."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

from paceline.core.tls import TlsConfig
from paceline.kv_transfer import tcp
from paceline.kv_transfer.base import Pool, TransportSettings
from paceline.kv_transfer.tcp import why_unreachable
from paceline.kv_transfer.tcp_reader import TcpReader
from paceline.kv_transfer.tcp_source import TcpSource
from tests.support.certificates import Mount

__all__ = ["make_reader", "make_source", "why_unreachable"]


def make_source(pool: Pool, settings: TransportSettings) -> TcpSource:
    return tcp.make_source(pool, replace(settings, tls=_certificates()))


def make_reader(pool: Pool, settings: TransportSettings) -> TcpReader:
    return tcp.make_reader(pool, replace(settings, tls=_certificates()))


@functools.cache
def _certificates() -> TlsConfig:
    """They have been read when their folder goes."""
    with tempfile.TemporaryDirectory() as folder:
        config = Mount(Path(folder) / "tls").config()
    return config
