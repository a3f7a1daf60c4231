"""The reader's end of a DescriptorSource: its offer, and whether it still lives."""

import os
import socket
from dataclasses import dataclass

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.kv_transfer.descriptor_wire import (
    MAX_HELLO_BYTES,
    VERSION,
    DescriptorAddress,
    DescriptorHello,
)
from paceline.kv_transfer.geometry import Geometry, check_equal, check_geometry, decode_peer
from paceline.kv_transfer.host import host_identity

_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)  # once: it takes longer than the call


class SourceConnection:
    """The source never speaks after its hello: anything to read is its end."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def check_alive(self) -> None:
        """Raises PeerGone when the source has died or closed, or this end was closed."""
        try:
            self._socket.recv(1, _PEEK)
        except BlockingIOError:
            return
        except OSError:
            pass
        raise PeerGone("the source died or closed")

    def wait_for_end(self) -> None:
        """Blocks until the source has died or closed, or this end is shut."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return

    def shut(self) -> None:
        """As if the source had closed. Whoever waits for its end returns."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True)
class Offer:
    """`fd` is the receiver's to close."""

    connection: SourceConnection
    fd: int
    num_bytes: int
    num_pages: int


def receive_descriptor(address: bytes, ours: Geometry, timeout_s: float) -> Offer:
    """Raises PeerGone when nobody answers, IncompatiblePeer when the pools do not match."""
    peer = decode_peer(address, DescriptorAddress, "address")
    check_equal("host", host_identity(), peer.host)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(timeout_s)
        message, fd = _receive_hello(connection, peer.socket_name)
        try:
            hello = decode_peer(message, DescriptorHello, "hello")
            _check_hello(hello, peer.incarnation, ours)
        except BaseException:
            os.close(fd)
            raise
        connection.setblocking(True)
    except BaseException:
        connection.close()
        raise
    return Offer(SourceConnection(connection), fd, hello.num_bytes, hello.geometry.num_pages)


def why_unreachable(address: bytes) -> str:
    """As base.Transport has it, for addresses of DescriptorSources."""
    try:
        peer = decode_peer(address, DescriptorAddress, "address")
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


def _receive_hello(connection: socket.socket, socket_name: str) -> tuple[bytes, int]:
    try:
        connection.connect(socket_name)
        message, fds, _, _ = socket.recv_fds(
            connection, MAX_HELLO_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
    except OSError as error:
        raise PeerGone(f"the source does not answer: {error.strerror or error}") from None
    if not fds:
        raise PeerGone("the source closed the connection: it is full, or of another user")
    return message, fds[0]


def _check_hello(hello: DescriptorHello, incarnation: str, ours: Geometry) -> None:
    check_equal("version", VERSION, hello.version)
    check_equal("incarnation", incarnation, hello.incarnation)
    check_geometry(ours, hello.geometry)
