"""Reader of tcp: links of a few connections each."""

from paceline.kv_transfer.base import LocalPool, TransportSettings
from paceline.kv_transfer.connection_link import ConnectionLink
from paceline.kv_transfer.geometry import decode_peer
from paceline.kv_transfer.tcp_connection import TcpConnection
from paceline.kv_transfer.tcp_wire import VERSION, ReaderHello, TcpAddress, token_of

MAX_CONNECTIONS = 4  # a link; further reads wait for one


class TcpReader:
    transport = "tcp"

    def __init__(self, pool: LocalPool, settings: TransportSettings) -> None:
        self._pool = pool
        self._settings = settings

    def connect(self, address: bytes, timeout_s: float) -> ConnectionLink:
        peer = decode_peer(address, TcpAddress, "address")
        token = token_of(self._settings.secret, self.transport, peer.incarnation)
        hello = ReaderHello(VERSION, peer.incarnation, token)
        return ConnectionLink(
            self.transport,
            self._pool,
            lambda deadline: TcpConnection(self._pool, peer, hello, self._settings.tls, deadline),
            MAX_CONNECTIONS,
            timeout_s,
        )

    def close(self) -> None: ...
