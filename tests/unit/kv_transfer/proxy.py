"""A TCP proxy between a reader and a source, whose connections the test can hold up and cut."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import msgspec

from paceline.kv_transfer.tcp_wire import TcpAddress


class Proxy:
    def __init__(self, address: bytes) -> None:
        self._target = msgspec.msgpack.decode(address, type=TcpAddress)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._flows = threading.Event()
        self._flows.set()
        self._threads[0].start()
        self.num_accepted = 0

    def address(self) -> bytes:
        port = self._listener.getsockname()[1]
        return msgspec.msgpack.encode(TcpAddress("127.0.0.1", port, self._target.incarnation))

    def cut(self) -> None:
        """Breaks every connection; new ones work."""
        for pair in list(self._pairs):  # not those that are made meanwhile
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def pause(self) -> None:
        """Accepts, but forwards nothing until `resume`."""
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def close(self) -> None:
        self.resume()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
        for end in (self._listener, *(end for pair in self._pairs for end in pair)):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._target.host, self._target.port))
                self._pairs.append((near, far))
                self.num_accepted += 1
                for pair in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._forward, args=pair))
                    self._threads[-1].start()

    def _forward(self, source: socket.socket, destination: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flows.wait()
                destination.sendall(data)
            destination.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxy_to(address: bytes) -> Iterator[Proxy]:
    proxy = Proxy(address)
    try:
        yield proxy
    finally:
        proxy.close()
