"""The rank's end of its front's links: sources and readers of a pool that only the rank can reach.

The front names, pins and verifies, whatever the transport; only `connect`, `read` and `close` of
kv_transfer/base.py's contract come here, each a call that is answered from a thread, so that a
source which does not answer holds up neither the step loop nor other links.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import structlog

from paceline.core.errors import ConfigError, IncompatiblePeer, PacelineError, PeerGone
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import (
    DevicePool,
    Link,
    Piece,
    Pool,
    Reader,
    Source,
    TransportSettings,
)
from paceline.worker.rank_messages import (
    CloseLink,
    ConnectLink,
    LinkCall,
    LinkFailure,
    LinkReply,
    ReadLink,
)

NUM_THREADS = 8  # copies, and sources that are slow to answer

_log = structlog.get_logger("paceline.rank")


class RankLinks:
    """`start` makes sources and readers. A call that fails for a reason that the contract does not
    know is `on_bug`'s: the device may be of no use any more."""

    def __init__(
        self,
        pool: Pool,
        settings: TransportSettings,
        reply: Callable[[LinkReply], None],
        on_bug: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._reply = reply
        self._on_bug = on_bug
        self._sources: list[Source] = []
        self._readers: dict[str, Reader] = {}
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="link")

    def start(self, transports: Sequence[str]) -> None:
        """What cannot be had is logged and left out."""
        for name in transports:
            try:
                self._readers[name] = registry.make_reader(name, self._pool, self._settings)
                source = registry.make_source(name, self._pool, self._settings)
            except ConfigError as error:
                _log.warning("a transport cannot be had", name=name, reason=error.message)
                continue
            source.start()
            self._sources.append(source)

    @property
    def has_neighbours(self) -> bool:
        """Whether a source that is read from lies on the pool's own device."""
        return isinstance(self._pool, DevicePool) and bool(self._pool.neighbours)

    def addresses(self) -> tuple[tuple[str, bytes], ...]:
        """Of the sources, by transport."""
        return tuple((source.transport, source.address()) for source in self._sources)

    def handle(self, call: LinkCall) -> None:
        """Returns at once."""
        self._threads.submit(self._answer, call)

    def close(self) -> None:
        for source in self._sources:
            source.close()
        for link in self._links.values():
            link.close()
        self._threads.shutdown()
        for reader in self._readers.values():
            reader.close()

    def _answer(self, call: LinkCall) -> None:
        try:
            self._reply(LinkReply(call.number, self._do(call)))
        except PacelineError as error:
            kind = type(error).__name__
            self._reply(LinkReply(call.number, b"", LinkFailure(kind, error.message, error.field)))
        except Exception:  # the edge of the thread: `_on_bug` decides
            _log.exception("a copy failed for a reason of ours")
            self._on_bug()

    def _do(self, call: LinkCall) -> bytes:
        match call:
            case ConnectLink():
                reader = self._readers.get(call.transport)
                if reader is None:
                    reason = f"{call.transport} cannot be had here"
                    raise IncompatiblePeer(reason, field="transport")
                link = reader.connect(call.address, call.timeout_s)
                with self._lock:
                    self._links[call.number] = link
            case ReadLink():
                source_pages = np.frombuffer(call.source_pages, np.int64)
                pages = np.frombuffer(call.destination_pages, np.int64)
                piece = Piece(source_pages, pages, call.num_tokens)
                return self._find(call.link).read(piece, call.timeout_s).tobytes()
            case CloseLink():
                with self._lock:
                    closed = self._links.pop(call.link, None)
                if closed is not None:
                    closed.close()
        return b""

    def _find(self, number: int) -> Link:
        with self._lock:
            link = self._links.get(number)
        if link is None:
            raise PeerGone("the link is closed")
        return link
