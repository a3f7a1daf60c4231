"""Transport `local`: source and reader in one process. The first that tests use."""

import os
import secrets
from dataclasses import dataclass, field

from paceline.core.errors import PeerGone
from paceline.kernels.pages import copy_pages
from paceline.kv_transfer.base import CellSums, LocalPool, Piece, Pool, TransportSettings, host_pool
from paceline.kv_transfer.geometry import check_geometry, check_source_pages, geometry_of

_sources: dict[bytes, "LocalSource"] = {}  # started and not closed, by address


@dataclass(slots=True)
class LocalSource:
    """Exports a pool to readers of this process."""

    pool: LocalPool
    transport: str = "local"
    _token: bytes = field(default_factory=lambda: f"{os.getpid()}-{secrets.token_hex(8)}".encode())

    def start(self) -> None:
        _sources[self._token] = self

    def address(self) -> bytes:
        return self._token

    def close(self) -> None:
        _sources.pop(self._token, None)


@dataclass(slots=True)
class LocalLink:
    address: bytes
    source_pool: LocalPool
    pool: LocalPool
    transport: str = "local"
    is_closed: bool = False

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        check_source_pages(piece.source_pages, self.source_pool.num_pages)
        self._check_alive()
        sums = copy_pages(
            self.pool.memory,
            self.source_pool.memory,
            piece.destination_pages,
            piece.source_pages,
            self.pool.group,
            piece.num_tokens,
        )
        self._check_alive()
        return sums

    def close(self) -> None:
        self.is_closed = True

    def _check_alive(self) -> None:
        if self.is_closed:
            raise PeerGone("the link is closed")
        if self.address not in _sources:
            raise PeerGone("the source closed")


@dataclass(frozen=True, slots=True)
class LocalReader:
    pool: LocalPool
    transport: str = "local"

    def connect(self, address: bytes, timeout_s: float) -> LocalLink:
        source = _sources.get(address)
        if source is None:
            raise PeerGone("no such source in this process")
        check_geometry(geometry_of(self.pool), geometry_of(source.pool))
        return LocalLink(address, source.pool, self.pool)

    def close(self) -> None: ...


def make_source(pool: Pool, settings: TransportSettings) -> LocalSource:
    return LocalSource(host_pool(pool, "local"))


def make_reader(pool: Pool, settings: TransportSettings) -> LocalReader:
    return LocalReader(host_pool(pool, "local"))


def why_unreachable(address: bytes) -> str:
    return "" if address in _sources else "the source lives in another process"
