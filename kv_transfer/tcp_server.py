"""What sources that listen on a TCP port have in common: they greet readers, a thread each.

Whoever connects gets HELLO_TIMEOUT_S and MAX_HELLO_BYTES to say who it is, and gives way to those
who come later: strangers who say nothing, however many, keep no reader out. Everything a peer can
ask for is bounded: connections, pages of a request, page numbers.
"""

import contextlib
import hmac
import socket
import threading
import time
from abc import ABC, abstractmethod

import msgspec
import numpy as np

from paceline.core.errors import ConfigError, IncompatiblePeer, PeerGone
from paceline.kv_transfer import tcp_wire as wire
from paceline.kv_transfer.base import MAX_PIECE_PAGES, LocalPool, PageIds, TransportSettings
from paceline.kv_transfer.geometry import geometry_of
from paceline.kv_transfer.tls_socket import secured

MAX_CONNECTIONS = 128  # of readers
MAX_STRANGERS = 128  # who have not said yet who they are
HELLO_TIMEOUT_S = 2.0
REQUEST_TIMEOUT_S = 2.0  # from a request's first byte to its last


class TcpServer(ABC):
    """A source on one port; a subclass says what follows the hellos."""

    transport: str

    def __init__(self, pool: LocalPool, settings: TransportSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._token = wire.token_of(settings.secret, self.transport, settings.incarnation)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, None] = {}  # of them, the oldest first
        self._readers: set[socket.socket] = set()
        self._closed = False
        self._listener = _listen(settings.host)
        host = settings.advertised_host or settings.host
        port = self._listener.getsockname()[1]
        self._address = wire.TcpAddress(host, port, settings.incarnation, settings.tls.is_on)
        name = f"{self.transport}-source"
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)

    @abstractmethod
    def _serve(self, connection: wire.Stream, hello: wire.ReaderHello) -> None:
        """Until the reader leaves or misbehaves, which may raise OSError or PacelineError."""

    def _endpoint(self) -> bytes:
        """What a welcome reader is told beside the geometry."""
        return b""

    def start(self) -> None:
        self._thread.start()

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self._address)

    def close(self) -> None:
        """Closes all connections: their readers see PeerGone."""
        with self._lock:
            self._closed = True
            connections = dict(self._connections)
        _shut(self._listener)
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()
        for connection, thread in connections.items():
            _shut(connection)
            thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or out of descriptors for the moment
                time.sleep(0.01)
                continue
            thread = threading.Thread(
                target=self._run,
                args=(connection,),
                name=f"{self.transport}-source-reader",
                daemon=True,
            )
            with self._lock:
                is_welcome = self._has_room()
                if is_welcome:
                    self._connections[connection] = thread
                    self._strangers[connection] = None
                    thread.start()
            if not is_welcome:
                connection.close()

    def _has_room(self) -> bool:
        """For one more stranger: the oldest gives way. Threads of those who did may not have ended
        yet."""
        if self._closed or len(self._connections) >= MAX_CONNECTIONS + 2 * MAX_STRANGERS:
            return False
        if len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            _shut(oldest)
        return True

    def _run(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, PeerGone, IncompatiblePeer):
                wire.prepare(connection)
                wire.set_timeout(connection, socket.SO_SNDTIMEO, wire.DEAD_AFTER_S)
                deadline = time.monotonic() + HELLO_TIMEOUT_S
                stream = secured(connection, self._settings.tls, deadline, is_server=True)
                hello = wire.receive_hello(stream, wire.ReaderHello, deadline)
                refused = self._why_refused(hello)
                if refused or self._is_admitted(connection):
                    self._answer(stream, refused)
                    if not refused:
                        self._serve(stream, hello)
        finally:
            with self._lock:
                del self._connections[connection]
                self._strangers.pop(connection, None)
                self._readers.discard(connection)
            connection.close()

    def _is_admitted(self, connection: socket.socket) -> bool:
        """As a reader, unless there are too many, or it has given way meanwhile."""
        with self._lock:
            if connection not in self._strangers or len(self._readers) >= MAX_CONNECTIONS:
                return False
            del self._strangers[connection]
            self._readers.add(connection)
            return True

    def _answer(self, connection: wire.Stream, refused: str) -> None:
        welcome = None if refused else geometry_of(self._pool)
        endpoint = b"" if refused else self._endpoint()
        answer = wire.SourceHello(wire.VERSION, refused, welcome, endpoint)
        connection.sendall(wire.hello_bytes(answer))

    def _why_refused(self, hello: wire.ReaderHello) -> str:
        if hello.version != wire.VERSION:
            return "version"
        if hello.incarnation != self._settings.incarnation:
            return "incarnation"
        return "" if hmac.compare_digest(hello.token, self._token) else "secret"

    def _next_pages(self, connection: wire.Stream) -> tuple[PageIds, int | None]:
        """Waits for a request that can be met; others are answered here."""
        while True:
            pages, num_tokens = _receive_request(connection, self._pool.group.page_tokens)
            outside = np.flatnonzero((pages < 0) | (pages >= self._pool.num_pages))
            if not len(outside):
                return pages, num_tokens or None
            page = int(pages[outside[0]])
            connection.sendall(wire.REPLY.pack(wire.NO_SUCH_PAGE, page))


def _receive_request(connection: wire.Stream, page_tokens: int) -> tuple[PageIds, int]:
    """Waits for the next request, for ever. Raises PeerGone for anything that is none."""
    wire.set_timeout(connection, socket.SO_RCVTIMEO, 0)
    head = connection.recv(wire.REQUEST.size)
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    if not wire.REQUEST_BYTES.startswith(head[: len(wire.REQUEST_BYTES)]):
        raise PeerGone("the peer does not speak this protocol")
    if not head:
        raise PeerGone("the reader left")
    head += wire.receive(connection, wire.REQUEST.size - len(head), deadline)
    magic, num_pages, num_tokens = wire.REQUEST.unpack(head)
    bounded = 1 <= num_pages <= MAX_PIECE_PAGES and num_tokens <= page_tokens
    if magic != wire.REQUEST_MAGIC or not bounded:
        raise PeerGone(f"a request for {num_pages} pages of {num_tokens} tokens is refused")
    return np.frombuffer(wire.receive(connection, 8 * num_pages, deadline), "<i8"), num_tokens


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise ConfigError("host", host, f"cannot be bound: {error.strerror}") from None


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
