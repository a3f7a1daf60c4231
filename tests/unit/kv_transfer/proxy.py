"""A TCP proxy between a reader and a source, whose connections the test can hold up and cut."""

import contextlib
from collections.abc import Iterator

import msgspec

from paceline.kv_transfer.tcp_wire import TcpAddress
from tests.support.tcp_proxy import TcpProxy


class Proxy(TcpProxy):
    def __init__(self, address: bytes) -> None:
        peer = msgspec.msgpack.decode(address, type=TcpAddress)
        super().__init__((peer.host, peer.port))
        self._incarnation = peer.incarnation

    def address(self) -> bytes:
        return msgspec.msgpack.encode(TcpAddress("127.0.0.1", self.port, self._incarnation))


@contextlib.contextmanager
def proxy_to(address: bytes) -> Iterator[Proxy]:
    proxy = Proxy(address)
    try:
        yield proxy
    finally:
        proxy.close()
