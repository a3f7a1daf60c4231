"""A link of a few connections, each reading one piece at a time; broken ones are rebuilt."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from paceline.core.errors import IncompatiblePeer, KvUnavailable, Overloaded, PeerGone
from paceline.kv_transfer.base import MAX_PIECE_PAGES, CellSums, LocalPool, Piece
from paceline.kv_transfer.geometry import check_destination_pages, check_source_pages

BROKEN_WITHIN_S = 0.5  # an idle connection that fails later was not broken before: its peer is gone


class Connection(Protocol):
    """Used by one thread at a time; `shut` may be called from any."""

    num_source_pages: int

    def is_usable(self) -> bool:
        """Whether it is open and quiet, as far as this host knows. Does not wait."""
        ...

    def read(self, piece: Piece, deadline: float) -> CellSums:
        """Raises PeerGone, after which it must be closed, or KvUnavailable."""
        ...

    def shut(self) -> None:
        """Ends a read that is going on in another thread, with PeerGone."""
        ...

    def close(self) -> None:
        """After it nothing is written into the pool any more."""
        ...


class ConnectionLink:
    """Connections that no read uses lie idle; TCP keepalive finds out when one dies there."""

    def __init__(
        self,
        transport: str,
        pool: LocalPool,
        make: Callable[[float], Connection],
        max_connections: int,
        timeout_s: float,
    ) -> None:
        """`make` connects by a deadline; the first connection is made here."""
        self.transport = transport
        self._pool = pool
        self._make = make
        first = make(time.monotonic() + timeout_s)
        self._num_source_pages = first.num_source_pages
        self._max_connections = max_connections
        self._slots = threading.BoundedSemaphore(max_connections)
        self._lock = threading.Lock()
        self._idle = [first]
        self._busy: set[Connection] = set()
        self._closed = False

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        """An idle connection that turns out to be broken costs one new one, not the read."""
        assert len(piece.source_pages) <= MAX_PIECE_PAGES
        check_source_pages(piece.source_pages, self._num_source_pages)
        check_destination_pages(piece.destination_pages, self._pool.num_pages)
        deadline = time.monotonic() + timeout_s
        if not self._slots.acquire(timeout=timeout_s):
            raise Overloaded(f"all {self._max_connections} connections to the source are busy")
        try:
            idle = self._take_idle()
            if idle:
                try:
                    began = time.monotonic()
                    return self._read_over(idle, piece, deadline)
                except PeerGone:
                    if self._closed or time.monotonic() >= min(deadline, began + BROKEN_WITHIN_S):
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

    def _take_idle(self) -> Connection | None:
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if connection.is_usable():
                    self._busy.add(connection)
                    return connection
                connection.close()
        return None

    def _rebuild(self, deadline: float) -> Connection:
        try:
            connection = self._make(deadline)
        except IncompatiblePeer as error:  # another process took over its port
            raise PeerGone(f"the source was replaced: {error.message}") from error
        with self._lock:
            self._busy.add(connection)
        return connection

    def _read_over(self, connection: Connection, piece: Piece, deadline: float) -> CellSums:
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

    def _give_back(self, connection: Connection, healthy: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            keep = healthy and not self._closed
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
