"""Reader of tcp: links of a few connections each, rebuilt when they break."""

import threading
import time

from paceline.core.errors import IncompatiblePeer, KvUnavailable, PeerGone
from paceline.kv_transfer.base import MAX_PIECE_PAGES, CellSums, LocalPool, Piece, TransportSettings
from paceline.kv_transfer.geometry import check_destination_pages, check_source_pages, decode_peer
from paceline.kv_transfer.tcp_connection import TcpConnection
from paceline.kv_transfer.tcp_wire import TcpAddress, token_of

MAX_CONNECTIONS = 4  # a link; further reads wait for one


class TcpReader:
    transport = "tcp"

    def __init__(self, pool: LocalPool, settings: TransportSettings) -> None:
        self._pool = pool
        self._secret = settings.secret

    def connect(self, address: bytes, timeout_s: float) -> "TcpLink":
        peer = decode_peer(address, TcpAddress, "address")
        token = token_of(self._secret, peer.incarnation)
        first = TcpConnection(self._pool, peer, token, time.monotonic() + timeout_s)
        return TcpLink(self._pool, peer, token, first)


class TcpLink:
    """Connections that no read uses lie idle; TCP keepalive finds out when one dies there."""

    transport = "tcp"

    def __init__(
        self, pool: LocalPool, address: TcpAddress, token: bytes, first: TcpConnection
    ) -> None:
        self._pool = pool
        self._address = address
        self._token = token
        self._num_source_pages = first.num_source_pages
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._idle = [first]
        self._busy: set[TcpConnection] = set()
        self._closed = False

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        """An idle connection that turns out to be broken costs one new one, not the read."""
        assert len(piece.source_pages) <= MAX_PIECE_PAGES
        check_source_pages(piece.source_pages, self._num_source_pages)
        check_destination_pages(piece.destination_pages, self._pool.num_pages)
        deadline = time.monotonic() + timeout_s
        if not self._slots.acquire(timeout=timeout_s):
            raise PeerGone(f"all {MAX_CONNECTIONS} connections are busy")
        try:
            idle = self._take_idle()
            if idle:
                try:
                    return self._read_over(idle, piece, deadline)
                except PeerGone:
                    if self._closed or time.monotonic() >= deadline:
                        raise
            return self._read_over(self._rebuild(deadline), piece, deadline)
        finally:
            self._slots.release()

    def close(self) -> None:
        """Reads that are going on end with PeerGone."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            connection.shut()

    def _take_idle(self) -> TcpConnection | None:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.is_usable():
                    self._busy.add(connection)
                    return connection
                connection.close()
        return None

    def _rebuild(self, deadline: float) -> TcpConnection:
        try:
            connection = TcpConnection(self._pool, self._address, self._token, deadline)
        except IncompatiblePeer as error:  # another process took over its port
            raise PeerGone(f"the source was replaced: {error.message}") from error
        with self._lock:
            self._busy.add(connection)
        return connection

    def _read_over(self, connection: TcpConnection, piece: Piece, deadline: float) -> CellSums:
        healthy = False
        try:
            if self._closed:
                raise PeerGone("the link is closed")
            sums = connection.read(piece, deadline)
            healthy = True
            return sums
        except PeerGone:
            raise
        except KvUnavailable:  # a refusal: the connection goes on
            healthy = True
            raise
        finally:
            self._give_back(connection, healthy)

    def _give_back(self, connection: TcpConnection, healthy: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            keep = healthy and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
