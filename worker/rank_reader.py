"""The front's end of links that its rank reads over: kv_transfer/base.py's contract, by calls.

The front has no context on the device, so a piece is asked for in one message and its sums come
back in another. How long a call may take is for the rank to keep: a copy that has begun cannot be
stopped, and nobody may go on as if it had been. When the rank ends, its copies have ended too.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import numpy as np

from paceline.core.errors import (
    EngineFailure,
    IncompatiblePeer,
    KvUnavailable,
    Overloaded,
    PacelineError,
    PeerGone,
    Unavailable,
)
from paceline.core.kv_layout import PageGroup
from paceline.kv_transfer.base import CellSums, Piece
from paceline.kv_transfer.geometry import check_destination_pages
from paceline.worker.rank_messages import (
    CloseLink,
    ConnectLink,
    LinkCall,
    LinkFailure,
    LinkReply,
    RankCommand,
    ReadLink,
)

_ERRORS: dict[str, type[PacelineError]] = {
    kind.__name__: kind for kind in (PeerGone, KvUnavailable, IncompatiblePeer, Overloaded)
}

MakeCall = Callable[[int], LinkCall]  # from the number that it gets
Answer = tuple[int, bytes]  # the number, and the sums of a read


class LinkCalls:
    """`call` belongs to threads, all else to the event loop in which this is made."""

    def __init__(self, send: Callable[[RankCommand], None]) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._pending: dict[int, Future[Answer]] = {}
        self._is_closed = False

    def call(self, make: MakeCall) -> Answer:
        """Blocks. Raises what a link may raise, Unavailable when the rank has ended."""
        future: Future[Answer] = Future()
        self._loop.call_soon_threadsafe(self._start, make, future)
        return future.result()

    def _start(self, make: MakeCall, future: "Future[Answer]") -> None:
        number = next(self._numbers)
        try:
            if self._is_closed:
                raise Unavailable("the worker's engine has stopped")
            self._send(make(number))
        except Unavailable as error:
            future.set_exception(error)
        else:
            self._pending[number] = future

    def reply(self, reply: LinkReply) -> None:
        future = self._pending.pop(reply.number)
        if reply.failure is None:
            future.set_result((reply.number, reply.sums))
        else:
            future.set_exception(_error_of(reply.failure))

    def close(self) -> None:
        """The rank has ended: fails what is under way."""
        self._is_closed = True
        while self._pending:
            _, future = self._pending.popitem()
            future.set_exception(Unavailable("the worker's engine has stopped"))


@dataclass(slots=True)
class RankReader:
    """Makes links of the rank's reader of one transport."""

    transport: str
    calls: LinkCalls
    group: PageGroup
    num_pages: int

    def connect(self, address: bytes, timeout_s: float) -> "RankReaderLink":
        number, _ = self.calls.call(
            lambda number: ConnectLink(number, self.transport, address, timeout_s)
        )
        return RankReaderLink(self.transport, self, number)

    def close(self) -> None: ...


@dataclass(slots=True)
class RankReaderLink:
    transport: str
    reader: RankReader
    number: int  # of the link, in the rank

    def read(self, piece: Piece, timeout_s: float) -> CellSums:
        check_destination_pages(piece.destination_pages, self.reader.num_pages)
        source_pages = piece.source_pages.astype(np.int64, copy=False).tobytes()
        pages = piece.destination_pages.astype(np.int64, copy=False).tobytes()
        _, sums = self.reader.calls.call(
            lambda number: ReadLink(
                number, self.number, source_pages, pages, piece.num_tokens, timeout_s
            )
        )
        return np.frombuffer(sums, np.uint64).reshape(-1, self.reader.group.num_heads)

    def close(self) -> None:
        with contextlib.suppress(Unavailable):  # the rank has ended, and its links
            self.reader.calls.call(lambda number: CloseLink(number, self.number))


def _error_of(failure: LinkFailure) -> PacelineError:
    kind = _ERRORS.get(failure.kind, EngineFailure)
    return kind.relayed(failure.message, field=failure.field)
