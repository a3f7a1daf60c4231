"""TLS over a connected socket, for code that knows sockets only.

Bytes go through memory, not through Python's SSLSocket: that one polls where there is a timeout,
takes two system calls for each record of 16 KiB, and may not be shut down by another thread.
"""

import errno
import socket
import ssl
import time

from paceline.core.errors import IncompatiblePeer, PeerGone
from paceline.core.tls import TlsConfig, carries, credentials
from paceline.core.tls_reasons import NAME, SET_UP, reason_of
from paceline.kv_transfer import tcp_wire as wire

CHUNK_BYTES = 256 << 10  # from and to the socket at once
MAX_BYTES = 256 << 30  # of a connection: its keys wear out (RFC 8446, section 5.5)


def secured(
    connection: socket.socket, tls: TlsConfig, deadline: float, *, is_server: bool
) -> wire.Stream:
    """What to talk over: `connection` itself where nothing is encrypted.

    Raises IncompatiblePeer when certificates or settings do not match, PeerGone when the peer
    leaves or is silent. The socket stays the caller's to close.
    """
    if not tls.is_on:
        return connection
    secure = TlsSocket(connection, tls, is_server=is_server)
    secure.shake_hands(tls.name, deadline)
    return secure


class TlsSocket:
    """What tcp_wire.py uses of a socket, with the same meaning; timeouts are the socket's own."""

    def __init__(self, plain: socket.socket, tls: TlsConfig, *, is_server: bool) -> None:
        held = credentials(tls)
        assert held is not None
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context, name = (held.server, None) if is_server else (held.client, tls.name)
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=is_server, server_hostname=name
        )
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._num_received = 0
        self._is_accepted = is_server  # a server refuses its client after the client's last word

    def shake_hands(self, name: str, deadline: float) -> None:
        while not self._advance():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise PeerGone("the peer is silent")
            wire.set_timeout(self._plain, socket.SO_RCVTIMEO, max(remaining, 1e-6))
            try:
                num_bytes = self._fill()
            except BlockingIOError:
                continue  # the deadline has passed
            except OSError:
                num_bytes = 0
            if not num_bytes:
                raise PeerGone(f"the peer left while TLS began; it may not speak it: {SET_UP}")
        if not carries(name, dict(self._tls.getpeercert() or {})):
            raise IncompatiblePeer(NAME, field="tls")

    def recv_into(self, view: memoryview, num_bytes: int = 0, flags: int = 0) -> int:
        """What has arrived, after one wait at most: BlockingIOError if that was not enough for a
        record. 0 at the end of the stream."""
        filled = self._take(view)
        if filled or not self._fill():
            return filled
        if filled := self._take(view):
            return filled
        raise BlockingIOError

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        """With MSG_PEEK it only tells whether there is something."""
        if flags & socket.MSG_PEEK:
            if self._incoming.pending or self._tls.pending() or self._num_received > MAX_BYTES:
                return b"\0"
            return self._plain.recv(num_bytes, flags)
        view = memoryview(bytearray(num_bytes))
        while not (filled := self._take(view)) and self._fill():
            continue
        return bytes(view[:filled])

    def sendall(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            self._tls.write(view[start : start + CHUNK_BYTES])
            self._flush()

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._plain.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        self._plain.shutdown(how)

    def close(self) -> None:
        self._plain.close()

    def _advance(self) -> bool:
        """True when the handshake is over, as far as this end knows."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise IncompatiblePeer(reason_of(error), field="tls") from None
        finally:
            self._flush()  # which also tells the peer why we leave
        return True

    def _take(self, view: memoryview) -> int:
        """Decrypts what is here already."""
        filled = 0
        while filled < len(view):
            try:
                num_bytes = self._tls.read(len(view) - filled, view[filled:])
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                break
            except ssl.SSLError as error:
                raise self._failure(reason_of(error)) from None
            assert isinstance(num_bytes, int)
            filled += num_bytes
        self._is_accepted |= filled > 0
        return filled

    def _fill(self) -> int:
        """Waits for what arrives next. 0 at the end of the stream."""
        num_bytes = self._plain.recv_into(self._chunk)
        self._incoming.write(self._chunk[:num_bytes])
        self._num_received += num_bytes
        return num_bytes

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._plain.sendall(self._outgoing.read())

    def _failure(self, reason: str) -> Exception:
        if self._is_accepted:
            return OSError(errno.EPROTO, reason)
        return IncompatiblePeer(reason, field="tls")
