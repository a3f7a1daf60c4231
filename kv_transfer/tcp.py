"""Transport `tcp`: works between any two hosts. The source sends pages from its pool, the reader
receives them into its own and sums each while it is in the cache.

Readers show that they know the deployment's secret. With certificates (core/tls.py) the bytes go
through TLS, else they are not encrypted.
"""

from paceline.core.errors import IncompatiblePeer
from paceline.kv_transfer.base import Pool, TransportSettings, host_pool
from paceline.kv_transfer.geometry import decode_peer
from paceline.kv_transfer.tcp_reader import TcpReader
from paceline.kv_transfer.tcp_source import TcpSource
from paceline.kv_transfer.tcp_wire import TcpAddress


def make_source(pool: Pool, settings: TransportSettings) -> TcpSource:
    return TcpSource(host_pool(pool, "tcp"), settings)


def make_reader(pool: Pool, settings: TransportSettings) -> TcpReader:
    return TcpReader(host_pool(pool, "tcp"), settings)


def why_unreachable(address: bytes) -> str:
    """Only a connection can tell; a readable address is worth trying one."""
    try:
        decode_peer(address, TcpAddress, "address")
    except IncompatiblePeer as error:
        return error.message
    return ""
