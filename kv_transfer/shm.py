"""Transport `shm`: processes of one host and one user share the pool's memory.

The source hands its pool's descriptor, opened for reading, over a unix socket and then says
nothing more: the connection stays open as a sign of life that the kernel ends with the process.
The socket is abstract, so a killed source leaves no file; the kernel tells who asks, and only the
source's own user is answered. The reader maps the pool and copies by itself: a source that is
merely stopped does not hold it up.

Only a memfd that cannot shrink is mapped; otherwise a source could kill its readers by SIGBUS.
"""

import socket

from paceline.core.errors import IncompatiblePeer
from paceline.kv_transfer.base import LocalPool, TransportSettings
from paceline.kv_transfer.geometry import decode_peer
from paceline.kv_transfer.host import host_identity
from paceline.kv_transfer.shm_reader import ShmReader
from paceline.kv_transfer.shm_source import ShmSource
from paceline.kv_transfer.shm_wire import ShmAddress


def make_source(pool: LocalPool, settings: TransportSettings) -> ShmSource:
    return ShmSource(pool, settings.incarnation)


def make_reader(pool: LocalPool, settings: TransportSettings) -> ShmReader:
    return ShmReader(pool)


def why_unreachable(address: bytes) -> str:
    try:
        peer = decode_peer(address, ShmAddress, "address")
    except IncompatiblePeer as error:
        return error.message
    if peer.host != host_identity():
        return "the source is on another host or in another network namespace"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(peer.socket_name)
        except OSError as error:
            return f"its socket does not answer: {error.strerror}"
    return ""
