"""Transport `multi`: the best transport that both ends have, decided once a peer.

A source exports its pool over all of them; a reader tries them, best first, and stays with the one
that connects. When that one fails while the peer still answers over another, the link goes on with
the other and says so; a peer that answers over none is gone.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from paceline.core.errors import IncompatiblePeer, PacelineError, PeerGone
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import (
    CellSums,
    DevicePool,
    Link,
    Piece,
    Pool,
    Reader,
    Source,
    TransportSettings,
)
from paceline.kv_transfer.geometry import decode_peer

_log = structlog.get_logger("paceline.kv_transfer")

Addresses = dict[str, bytes]  # by transport

FALL_BACK_S = 1.0  # for a peer that another transport has lost to answer


class MultiSource:
    """Several sources of one pool."""

    transport = "multi"

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources

    def start(self) -> None:
        try:
            for source in self.sources:
                source.start()
        except BaseException:
            self.close()
            raise

    def address(self) -> bytes:
        return msgspec.msgpack.encode(self.addresses())

    def addresses(self) -> Addresses:
        return {source.transport: source.address() for source in self.sources}

    def close(self) -> None:
        for source in self.sources:
            source.close()


class MultiReader:
    """Readers into one pool, made when they are first tried."""

    transport = "multi"

    def __init__(self, names: Sequence[str], make: Callable[[str], Reader]) -> None:
        self._names = names
        self._make = make
        self._lock = threading.Lock()
        self._readers: dict[str, Reader] = {}

    def connect(self, address: bytes, timeout_s: float) -> "MultiLink":
        return self.connect_to(decode_peer(address, Addresses, "address"), timeout_s)

    def connect_to(
        self, offered: Mapping[str, bytes], timeout_s: float, source: str = ""
    ) -> "MultiLink":
        """By the first of our transports that reaches a source with these addresses; `source`
        names it in logs.

        Raises, with a reason for each, PeerGone if one of them might have reached it, else
        IncompatiblePeer.
        """
        peer = Peer(source, offered)
        choice = self.choose(self._names, peer, time.monotonic() + timeout_s)
        return MultiLink(self, peer, choice)

    def choose(self, names: Sequence[str], peer: "Peer", deadline: float) -> "Choice":
        """The first of `names` that connects. Those that may still follow share the time."""
        reasons: list[str] = []
        failures: list[PacelineError] = []
        lost: list[str] = []
        for i, name in enumerate(names):
            reason = registry.why_not(name, peer.offered)
            if not reason:
                others = tuple(other for other in names[i + 1 :] if other in peer.offered)
                try:
                    link = self._reader(name).connect(peer.offered[name], share(deadline, others))
                    return Choice(name, link, others, tuple(lost))
                except (PeerGone, IncompatiblePeer) as error:
                    failures.append(error)
                    reason = error.message
                    lost.append(f"{name}: {reason}")
                    _log.warning("a transport failed", name=name, source=peer.source, reason=reason)
            reasons.append(f"{name}: {reason}")
        raise _all_failed(reasons, failures)

    def close(self) -> None:
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()

    def _reader(self, name: str) -> Reader:
        with self._lock:
            if name not in self._readers:
                self._readers[name] = self._make(name)
            return self._readers[name]


@dataclass(frozen=True, slots=True)
class Peer:
    source: str
    offered: Mapping[str, bytes]  # addresses by transport


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport that connected, and those of both ends that are worse."""

    name: str
    link: Link
    others: tuple[str, ...]
    lost: tuple[str, ...]  # of both ends, and better, that did not connect, each with its reason


class MultiLink:
    """`transport`: the one in use; `lost`: better ones of both ends, with what each failed of."""

    def __init__(self, reader: MultiReader, peer: Peer, choice: Choice) -> None:
        self._reader = reader
        self._peer = peer
        self._lock = threading.Lock()
        self._choice = choice
        self._closed = False
        self.transport = choice.name
        self.lost = list(choice.lost)

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        deadline = time.monotonic() + timeout_s
        while True:
            choice = self._choice
            try:
                return choice.link.read(piece, share(deadline, choice.others))
            except PeerGone as error:
                if self._closed or not choice.others:
                    raise
                self._fall_back(choice, error, deadline)

    def close(self) -> None:
        """Reads that are going on end with PeerGone."""
        with self._lock:
            self._closed = True
            self._choice.link.close()

    def _fall_back(self, lost: Choice, error: PeerGone, deadline: float) -> None:
        """The first read that loses a transport chooses the next one, the others wait for it."""
        with self._lock:
            if self._choice is not lost or self._closed:
                return
            answers_by = min(deadline, time.monotonic() + FALL_BACK_S)
            self._choice = self._reader.choose(lost.others, self._peer, answers_by)
            self.transport = self._choice.name
            self.lost += (f"{lost.name}: {error.message}", *self._choice.lost)
            _log.warning(
                "a link fell back to another transport",
                source=self._peer.source,
                lost=lost.name,
                reason=error.message,
                now=self.transport,
            )
            lost.link.close()


def _all_failed(reasons: Sequence[str], failures: Sequence[PacelineError]) -> PacelineError:
    """PeerGone if another try may succeed; a field that all name is the reason of all."""
    kind = PeerGone if any(isinstance(f, PeerGone) for f in failures) else IncompatiblePeer
    fields = {failure.field for failure in failures}
    field = fields.pop() if len(fields) == 1 else None
    message = "no transport reaches the source: " + "; ".join(reasons)
    return kind(message, field=field or "transport")


def share(deadline: float, others: Sequence[str]) -> float:
    """Seconds for one attempt: half of what is left while others may have to follow."""
    remaining = deadline - time.monotonic()
    return max(0.05, remaining / 2 if others else remaining)


def export(names: Sequence[str], pool: Pool, settings: TransportSettings) -> MultiSource:
    """Sources of all these transports. Raises ConfigError for one that cannot be had."""
    sources: list[Source] = []
    try:
        for name in names:
            sources.append(registry.make_source(name, pool, settings))
    except BaseException:
        MultiSource(sources).close()
        raise
    return MultiSource(sources)


def make_source(pool: Pool, settings: TransportSettings) -> MultiSource:
    return export(_candidates(pool, settings), pool, settings)


def make_reader(pool: Pool, settings: TransportSettings) -> MultiReader:
    names = _candidates(pool, settings)
    return MultiReader(names, lambda name: registry.make_reader(name, pool, settings))


def _candidates(pool: Pool, settings: TransportSettings) -> list[str]:
    on_device = isinstance(pool, DevicePool)
    return registry.names_of((registry.AUTO,), on_device=on_device, tls=settings.tls)


def why_unreachable(address: bytes) -> str:
    try:
        offered = decode_peer(address, Addresses, "address")
    except IncompatiblePeer as error:
        return error.message
    reasons = [registry.why_not(name, offered) for name in offered]
    return "" if "" in reasons else "; ".join(reasons) or "the source offers nothing"
