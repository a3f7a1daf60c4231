"""The contract of a connector: a source exports pages, a reader copies cell ranges of them.

Who calls what, in which order:

    source side                                     reader side
    -----------                                     -----------
    Source.start()                                  Reader.connect(address) → Link, once a peer
    Source.address() → put into Describe            Link.read(piece) → sums   (any thread, many)
    Source.close()                                  Link.close(), Reader.close()

Names, pins and leases are not here: they are calls of KvTransferService. A connector sees page
numbers that the caller has pinned at the source and fenced at the destination.

What blocks: `connect` and `read` block the calling thread, never longer than their deadline.
Which pages: a page that the source does not have is `KvUnavailable`, checked at the source too; a
destination page outside the local pool is our own bug, an IndexError.
What a failure leaves: a `read` that raises may have written any part of the destination pages of
its piece, and writes nothing more after it has raised. Nothing at the source needs freeing.
What a dead peer looks like: `PeerGone` within the deadline, at once where the transport knows;
never a hang, never a short read that returns.
Authority: `read` returns checksums over the bytes as they lie in the destination. It does not
compare them: `kv_transfer.pull` does, against what the pin promised.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import PageGroup
from paceline.core.tls import PLAIN, TlsConfig
from paceline.kv_transfer.copy_pace import CopyPace
from paceline.kv_transfer.neighbours import Neighbours

if TYPE_CHECKING:  # a process that has no pool on a device never loads torch
    import torch

PageIds = NDArray[np.int64]
CellSums = NDArray[np.uint64]  # [pages, heads]

MAX_PIECE_PAGES = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """One bounded copy: page source_pages[i] of the peer into page destination_pages[i] here.

    At most MAX_PIECE_PAGES of them.
    """

    source_pages: PageIds
    destination_pages: PageIds
    num_tokens: int | None = None  # of each cell; None: whole pages. Set for a partial last page


class Source(Protocol):
    """Exports one pool to readers. Closing it makes readers see `PeerGone`."""

    transport: str

    def start(self) -> None: ...

    def address(self) -> bytes:
        """What a reader of the same transport needs to connect. Opaque to everybody else."""
        ...

    def close(self) -> None: ...


class Link(Protocol):
    """A reader's connection to one source. Thread-safe: reads may run in parallel."""

    transport: str

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        """Copies `piece` and returns the sums of what lies in the destination.

        Raises PeerGone (dead, closed, silent past `timeout_s`, or earlier where the transport can
        tell silence from slowness), KvUnavailable (no such page),
        Overloaded (other reads over this link took all of `timeout_s`: the peer is well).
        """
        ...

    def close(self) -> None: ...


class Reader(Protocol):
    """Makes links that copy into one local pool."""

    transport: str

    def connect(self, address: bytes, timeout_s: float) -> Link:
        """Raises PeerGone when nobody answers, IncompatiblePeer when the pools do not match."""
        ...

    def close(self) -> None:
        """Frees what the links share; they are closed before."""
        ...


@dataclass(frozen=True, slots=True)
class LocalPool:
    """The pool on this side, in host memory: `fd` is a memfd when other processes may map it,
    else -1."""

    memory: memoryview  # writable bytes, page 0 first
    group: PageGroup
    num_pages: int
    fd: int = -1


@dataclass(frozen=True, slots=True)
class DevicePool:
    """The pool on this side, on a CUDA device: `fd` exports its memory to other processes, or is
    -1. `pace` is that of copies into it, which shall not hold up a batch computed there."""

    memory: "torch.Tensor"  # uint8 [bytes], page 0 first
    group: PageGroup
    num_pages: int
    fd: int = -1
    pace: CopyPace = field(default_factory=CopyPace)
    neighbours: Neighbours = field(default_factory=Neighbours)  # that links of ours read from


Pool = LocalPool | DevicePool


def host_pool(pool: Pool, transport: str) -> LocalPool:
    """Raises ConfigError for a pool that is elsewhere."""
    if not isinstance(pool, LocalPool):
        raise ConfigError("transport", transport, "needs a pool in host memory")
    return pool


def device_pool(pool: Pool, transport: str) -> DevicePool:
    """Raises ConfigError for a pool that is elsewhere."""
    if not isinstance(pool, DevicePool):
        raise ConfigError("transport", transport, "needs a pool on a CUDA device")
    return pool


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """What a source and the readers of this process need beside the pool."""

    incarnation: str  # of the local pool; a source is asked for it by every reader
    host: str = "127.0.0.1"  # a listening source binds to it
    advertised_host: str = ""  # under which readers reach it; empty: `host`
    secret: bytes = b""  # the deployment's; strangers without it are refused
    tls: TlsConfig = PLAIN  # of connections that a source listens for


class Transport(Protocol):
    """What a transport's module offers the registry."""

    def make_source(self, pool: Pool, settings: TransportSettings) -> Source:
        """Raises ConfigError when this pool cannot be exported this way."""
        ...

    def make_reader(self, pool: Pool, settings: TransportSettings) -> Reader:
        """Raises ConfigError when nothing can be read into this pool this way."""
        ...

    def why_unreachable(self, address: bytes) -> str:
        """Why a reader in this process cannot use `address`; empty when it can. Does not wait."""
        ...
