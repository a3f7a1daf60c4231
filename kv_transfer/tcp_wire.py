"""Bytes on a TCP connection between source and reader. Integers little-endian, lengths bounded.

    reader → source   MAGIC, length, ReaderHello         once a connection
    source → reader   MAGIC, length, SourceHello         or the connection closes
    reader → source   REQUEST, page ids as int64         as often as it likes
    source → reader   REPLY, then the pages' cells       whole pages, or the used start of each cell

With certificates all this goes through TLS. Anything else closes the connection at its first wrong
byte. Transports whose library moves the
cells speak the same: `ucx` up to the REPLY, `nixl` the hellos only.
"""

import hmac
import socket
import struct
import time
from typing import Protocol, TypeVar

import msgspec

from paceline.core.errors import PeerGone
from paceline.kv_transfer.geometry import Geometry, decode_peer

T = TypeVar("T", bound=msgspec.Struct)

VERSION = 2
MAGIC = b"PACEKV\r\n"
MAX_HELLO_BYTES = 64 << 10  # an endpoint names every network device of its host
LENGTH = struct.Struct("<I")
REQUEST = struct.Struct("<III")  # REQUEST_MAGIC, number of pages, tokens of each cell (0: all)
REQUEST_MAGIC = 0x51525650
REQUEST_BYTES = REQUEST_MAGIC.to_bytes(4, "little")
REPLY = struct.Struct("<Iq")  # status, its value
OK = 0x4B4F5650  # value: bytes that follow
NO_SUCH_PAGE = 0x45505650  # value: the page; the connection goes on

KEEPALIVE_IDLE_S = 3
KEEPALIVE_INTERVAL_S = 1
DEAD_AFTER_S = 6  # unacknowledged for so long: the peer is gone
SILENT_AFTER_S = 1.5  # not a byte of what a reader waits for: it asks elsewhere
_WAIT_S = 0.25  # of one call, which may return after it with what it has
_TIMEVAL = struct.Struct("ll")
_PEEK = int(socket.MSG_DONTWAIT | socket.MSG_PEEK)  # once: it takes longer than the call


class Stream(Protocol):
    """A connected socket, or TLS over one (tls_socket.py)."""

    def recv(self, num_bytes: int, flags: int = 0, /) -> bytes: ...
    def recv_into(self, view: memoryview, num_bytes: int = 0, flags: int = 0, /) -> int: ...
    def sendall(self, data: bytes | memoryview, /) -> None: ...
    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class TcpAddress(msgspec.Struct, frozen=True, array_like=True):
    host: str
    port: int
    incarnation: str
    is_encrypted: bool = False  # readers must speak TLS


class ReaderHello(msgspec.Struct, frozen=True, array_like=True):
    version: int
    incarnation: str  # of the pool that the reader wants
    token: bytes
    endpoint: bytes = b""  # the library's name for the reader, where a library moves the cells


class SourceHello(msgspec.Struct, frozen=True, array_like=True):
    version: int
    refused: str  # the reader's field that does not match; empty: welcome
    geometry: Geometry | None
    endpoint: bytes = b""


def token_of(secret: bytes, transport: str, incarnation: str) -> bytes:
    """Shows that the reader knows the deployment's secret."""
    text = f"paceline-kv-{transport}\0{incarnation}"
    return hmac.digest(secret, text.encode(), "sha256")


def prepare(connection: socket.socket) -> None:
    """Small messages leave at once; a dead peer is noticed, busy or idle."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
    connection.setblocking(True)


def set_timeout(connection: Stream, option: int, timeout_s: float) -> None:
    """SO_RCVTIMEO or SO_SNDTIMEO; 0 waits for ever.

    Python's own timeouts make the socket non-blocking, which costs a poll for each call and the
    use of MSG_WAITALL.
    """
    seconds = int(timeout_s)
    value = _TIMEVAL.pack(seconds, int((timeout_s - seconds) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, option, value)


def receive_into(connection: Stream, view: memoryview, deadline: float) -> None:
    """Fills `view`. Raises PeerGone: the end of the stream, an error, `deadline` passed, or
    nothing came for SILENT_AFTER_S."""
    heard = time.monotonic()
    while len(view):
        remaining = min(deadline, heard + SILENT_AFTER_S) - time.monotonic()
        if remaining <= 0:
            raise PeerGone("the peer is silent")
        set_timeout(connection, socket.SO_RCVTIMEO, max(min(remaining, _WAIT_S), 1e-6))
        try:
            received = connection.recv_into(view, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            continue
        except OSError as error:
            raise PeerGone(f"the connection broke: {error.strerror}") from None
        if not received:
            raise PeerGone("the peer closed the connection")
        heard = time.monotonic()
        view = view[received:]


def is_quiet(connection: Stream) -> bool:
    """Whether it is open and has nothing to read, as far as this host knows. Does not wait."""
    try:
        connection.recv(1, _PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def receive(connection: Stream, num_bytes: int, deadline: float) -> bytes:
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data), deadline)
    return bytes(data)


def hello_bytes(hello: ReaderHello | SourceHello) -> bytes:
    payload = msgspec.msgpack.encode(hello)
    return MAGIC + LENGTH.pack(len(payload)) + payload


def receive_hello(connection: Stream, kind: type[T], deadline: float) -> T:
    """Raises PeerGone at the first byte that is not ours, IncompatiblePeer for another version."""
    for expected in MAGIC:
        if receive(connection, 1, deadline)[0] != expected:
            raise PeerGone("the peer does not speak this protocol")
    (length,) = LENGTH.unpack(receive(connection, LENGTH.size, deadline))
    if length > MAX_HELLO_BYTES:
        raise PeerGone(f"the peer's hello of {length} bytes is longer than {MAX_HELLO_BYTES}")
    return decode_peer(receive(connection, length, deadline), kind, "hello")
