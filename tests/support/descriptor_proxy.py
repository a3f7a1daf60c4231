"""A proxy of the unix sockets over which sources of a host hand out their memory."""

import contextlib
import os
import secrets
import socket
import threading

import msgspec

from paceline.kv_transfer.descriptor_wire import MAX_HELLO_BYTES, DescriptorAddress


class DescriptorProxy:
    """Passes the source's hello and descriptor on; then both connections are its sign of life."""

    def __init__(self, source: bytes) -> None:
        peer = msgspec.msgpack.decode(source, type=DescriptorAddress)
        self.target = peer.socket_name
        name = f"\0paceline-kv-{secrets.token_hex(16)}"
        self.address = msgspec.msgpack.encode(DescriptorAddress(peer.host, name, peer.incarnation))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(name)
        self._listener.listen()
        self._ends: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Breaks every connection; new ones work."""
        ends, self._ends = list(self._ends), []
        for end in ends:
            _shut(end)

    def close(self) -> None:
        _shut(self._listener)
        self._thread.join()
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                try:
                    far.connect(self.target)
                    hello, fds, _, _ = socket.recv_fds(far, MAX_HELLO_BYTES, 1)
                    socket.send_fds(near, [hello], fds)
                except OSError:  # the source is down
                    near.close()
                    far.close()
                    continue
                for fd in fds:
                    os.close(fd)
                self._ends += (near, far)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=_end_together, args=pair, daemon=True).start()


def _end_together(end: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while end.recv(1):
            pass
    _shut(other)
    end.close()


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
