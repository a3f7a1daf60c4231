"""A source that hands out a descriptor of its pool's memory, to readers on its host.

It then says nothing more: connections stay open as a sign of life that the kernel ends with the
process. The socket is abstract, so a killed source leaves no file; the kernel tells who asks, and
only the source's own user is answered.
"""

import os
import secrets
import selectors
import socket
import struct
import threading
import time
from typing import cast

import msgspec

from paceline.kv_transfer.base import Pool
from paceline.kv_transfer.descriptor_wire import VERSION, DescriptorAddress, DescriptorHello
from paceline.kv_transfer.geometry import geometry_of
from paceline.kv_transfer.host import host_identity

MAX_CONNECTIONS = 256
_PAUSE_S = 0.01
_NUM_OWN_SOCKETS = 2  # listener and wake-up, beside the readers in the selector
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class DescriptorSource:
    """Owns `fd`. One thread answers all readers; it never waits for one of them."""

    def __init__(
        self, transport: str, pool: Pool, incarnation: str, fd: int, num_bytes: int
    ) -> None:
        self.transport = transport
        hello = DescriptorHello(VERSION, incarnation, geometry_of(pool), num_bytes)
        self._hello = msgspec.msgpack.encode(hello)
        name = f"\0paceline-kv-{secrets.token_hex(16)}"
        self._address = DescriptorAddress(host_identity(), name, incarnation)
        self._fd = fd
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._wake, self._woken = socket.socketpair()
        name = f"{transport}-source"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listener.bind(self._address.socket_name)
        self._listener.listen(MAX_CONNECTIONS)
        self._thread.start()

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._address)

    def close(self) -> None:
        """Readers see PeerGone from now on; those who have the pool mapped keep the mapping."""
        self._wake.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()
        self._woken.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while self._woken not in (ready := _wait(selector)):
                for connection in ready:
                    if connection is self._listener:
                        self._greet(selector)
                    else:  # a reader has nothing to say: it left
                        selector.unregister(connection)
                        connection.close()
            for key in list(selector.get_map().values()):
                if key.fileobj not in (self._listener, self._woken):
                    cast(socket.socket, key.fileobj).close()

    def _greet(self, selector: selectors.BaseSelector) -> None:
        try:
            reader, _ = self._listener.accept()
        except OSError:  # it left again, or we are out of descriptors for the moment
            time.sleep(_PAUSE_S)
            return
        try:
            num_readers = len(selector.get_map()) - _NUM_OWN_SOCKETS
            if num_readers >= MAX_CONNECTIONS or _user_of(reader) != os.geteuid():
                raise PermissionError
            reader.setblocking(False)
            socket.send_fds(reader, [self._hello], [self._fd])
            selector.register(reader, selectors.EVENT_READ)
        except OSError:
            reader.close()


def _wait(selector: selectors.BaseSelector) -> list[socket.socket]:
    return [cast(socket.socket, key.fileobj) for key, _ in selector.select()]


def _user_of(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(raw)[1]
    return user
