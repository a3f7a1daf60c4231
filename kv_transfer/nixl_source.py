"""Source of nixl: registers the pool and hands out the key to it. It takes no part in reads."""

import socket

import msgspec

from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import LocalPool, TransportSettings
from paceline.kv_transfer.nixl_agent import NixlAgent
from paceline.kv_transfer.nixl_wire import NixlEndpoint
from paceline.kv_transfer.tcp_server import TcpServer


class NixlSource(TcpServer):
    """Readers that know the secret get the key; their connections stay open as a sign of life."""

    transport = "nixl"

    def __init__(self, pool: LocalPool, settings: TransportSettings) -> None:
        self._agent = NixlAgent("source", pool)
        try:
            super().__init__(pool, settings)
        except BaseException:
            self._agent.close()
            raise

    def close(self) -> None:
        super().close()
        if not self._agent.is_closed:
            self._agent.close()

    def _endpoint(self) -> bytes:
        endpoint = NixlEndpoint(self._agent.metadata, self._agent.base_address)
        return msgspec.msgpack.encode(endpoint)

    def _serve(self, connection: wire.Stream, hello: wire.ReaderHello) -> None:
        wire.set_timeout(connection, socket.SO_RCVTIMEO, 0)
        connection.recv(1)  # a reader has nothing to say: it left
