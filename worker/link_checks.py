"""What a link to a source has to show: a canary before the first pull, and how fast it is.

Who fails the canary is kept apart for as long as its incarnation lives: its KV is not ours, though
its digests say so. It is forgotten when nobody has named it for a while: it is gone, or would be
compared once more. A slow link is used, and reported.
"""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import structlog

from paceline.core.errors import IncompatiblePeer, PacelineError
from paceline.engine.messages import CanaryCompared, CompareCanary, PoolReply
from paceline.kv_transfer.base import MAX_PIECE_PAGES, Link, PageIds, Piece
from paceline.kv_transfer.link_statistics import LinkStatistics
from paceline.kv_transfer.pull import PinnedPages, pull_verified
from paceline.kv_transfer.uneven_pull import Limits
from paceline.v1 import kv_pb2
from paceline.worker.connectors import Reached
from paceline.worker.quarantine import PeerKey
from paceline.worker.rank_messages import CanaryPages
from paceline.worker.uneven import canary_runs

T = TypeVar("T")
Compare = Callable[[CompareCanary], Awaitable[PoolReply]]

MAX_APART = 1024  # sources remembered
APART_S = 600.0  # and for how long, since a request or a record has last named them
MAX_THREADS = 5  # links that are looked at, at once
CANARY_TIMEOUT_S = 3.0
TEST_BYTES = 64 << 20  # of a self-test, at most
TEST_S = 0.25
TEST_PIECE_BYTES = 4 << 20
TEST_TIMEOUT_S = CANARY_TIMEOUT_S  # of one read: the canary has come within it
_NUM_SHORT_READS = 8

_log = structlog.get_logger("paceline.worker")


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    bytes_per_second: float  # of the fastest piece: others may have shared the link
    seconds: float  # of the shortest read of a token


@dataclass(slots=True)
class Apart:
    error: IncompatiblePeer
    named: float  # when a request or a record has named it last


class LinkChecks:
    """Of one incarnation. `compare` asks its rank; `floor` is in bytes a second."""

    def __init__(
        self,
        canary: CanaryPages,
        compare: Compare,
        floor: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._canary = canary
        self._compare = compare
        self._floor = floor
        self._turn = asyncio.Lock()  # of the arrival pages
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="link-check")
        self._passed: dict[PeerKey, str] = {}  # by what
        self._apart: dict[PeerKey, Apart] = {}

    @property
    def apart(self) -> Mapping[PeerKey, str]:
        """Sources that are kept apart, and why."""
        return {key: apart.error.message for key, apart in self._apart.items()}

    def is_apart(self, key: PeerKey) -> bool:
        """Of a source that somebody has named."""
        if key not in self._apart:
            return False
        self._apart[key].named = self._clock()
        return True

    def refuse_apart(self, key: PeerKey) -> None:
        """Raises IncompatiblePeer for a source that does not fit."""
        if self.is_apart(key):
            known = self._apart[key].error
            raise IncompatiblePeer(known.message, field=known.field)

    def forget_gone(self) -> None:
        """Sources kept apart that nobody names any more."""
        oldest = self._clock() - APART_S
        self._apart = {key: apart for key, apart in self._apart.items() if apart.named >= oldest}

    async def admit(
        self,
        key: PeerKey,
        description: kv_pb2.DescribeResponse,
        reached: Reached,
        *,
        again: bool = False,
    ) -> None:
        """The first pairing with a source, or one `again`: pulls its canary and compares it with
        ours. Raises IncompatiblePeer if it is another, and what a pull raises.
        """
        if key in self._passed and not again:
            return
        _forget_older(self._apart, key)
        _forget_older(self._passed, key)
        async with self._turn:
            await self._in_thread(lambda: self._pull(description, reached))
            compared = await self._compare(CompareCanary())
        assert isinstance(compared, CanaryCompared)
        if not compared.distance <= compared.tolerance:  # NaN is not
            shown = "NaN" if math.isnan(compared.distance) else f"{compared.distance:.3g}"
            limit = f"more than {compared.tolerance:g}"
            reason = f"canary: its KV differs from ours by {shown}, {limit}"
            raise IncompatiblePeer(reason, field="canary")
        _remember(self._passed, key, reached.link.transport)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """One of ours: what else this process does in threads waits for no source."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _pull(self, description: kv_pb2.DescribeResponse, reached: Reached) -> None:
        """Into our arrival pages."""
        ends = time.monotonic() + CANARY_TIMEOUT_S
        limits = Limits(ends, threading.Event(), lambda page, generation: None)
        figures = LinkStatistics(reached.statistics.group)  # no request's bytes
        if reached.uneven is not None:
            layouts = reached.uneven.layouts
            for run in canary_runs(layouts, description.canary, self._canary):
                reached.uneven.pull(run, figures, limits)
            return
        pull_verified(
            reached.link,
            self._pages(description),
            figures,
            deadline=limits.deadline,
            cancelled=limits.cancelled,
            report=limits.report,
        )

    def _pages(self, description: kv_pb2.DescribeResponse) -> PinnedPages:
        offered, ours = description.canary, self._canary
        sums = [list(page.checksums) for page in offered]
        if [len(row) for row in sums] != [len(row) for row in ours.checksums]:
            raise IncompatiblePeer(f"the source has a canary of {len(sums)} pages", field="canary")
        return PinnedPages(
            source_pages=np.array([page.page for page in offered], np.int64),
            destination_pages=np.array(ours.arrivals, np.int64),
            generations=np.zeros(len(offered), np.uint64),
            checksums=np.array(sums, np.uint64),
        )

    def keep_apart(self, key: PeerKey, error: IncompatiblePeer) -> None:
        """For as long as its incarnation lives: nothing that it could do would make it fit."""
        _forget_older(self._apart, key)
        _remember(self._apart, key, Apart(error, self._clock()))
        reason = {"field": error.field, "reason": error.message}
        _log.error("a source is kept apart", source=key[0], incarnation=key[1], **reason)

    async def self_test(
        self, source: str, description: kv_pb2.DescribeResponse, reached: Reached
    ) -> LinkSpeed | None:
        """How fast the link is; None if it broke meanwhile. A slow one is told of in the log."""
        pages = np.array([page.page for page in description.canary], np.int64)
        try:
            speed = await self._in_thread(lambda: self._measure(reached, pages))
        except PacelineError:
            return None
        if self.is_slow(speed):
            found = {
                "mb_per_s": _megabytes(speed.bytes_per_second),
                "floor": _megabytes(self._floor),
            }
            _log.warning("a link is slow", source=source, transport=reached.link.transport, **found)
        return speed

    def is_slow(self, speed: LinkSpeed) -> bool:
        return speed.bytes_per_second < self._floor

    def slowness(self, speed: LinkSpeed) -> str:
        """Why a link is reported; empty if it is as fast as it should be."""
        if not self.is_slow(speed):
            return ""
        return f"{_megabytes(speed.bytes_per_second)} MB/s, below {_megabytes(self._floor)}"

    def _measure(self, reached: Reached, source_pages: PageIds) -> LinkSpeed:
        link, page_bytes = reached.link, reached.statistics.group.page_bytes
        to = self._canary.scratch if reached.scratch is None else reached.scratch
        short = Piece(source_pages[:1], np.array([to]), num_tokens=1)
        shortest = min(_seconds(link, short) for _ in range(_NUM_SHORT_READS))
        most_pages = min(max(1, TEST_PIECE_BYTES // page_bytes), MAX_PIECE_PAGES)
        num_pages, best = 1, 0.0  # a slow link is measured by pieces that it moves in time
        left, ends = max(1, TEST_BYTES // page_bytes), time.monotonic() + TEST_S
        while left > 0 and (not best or time.monotonic() < ends):
            piece = Piece(np.resize(source_pages, num_pages), np.full(num_pages, to))
            seconds = max(_seconds(link, piece), 1e-9)
            best = max(best, num_pages * page_bytes / seconds)
            left -= num_pages
            if seconds < TEST_S / 8:
                num_pages = 2 * num_pages
            num_pages = min(num_pages, most_pages, left)
        return LinkSpeed(best, shortest)


def _forget_older(known: dict[PeerKey, T], key: PeerKey) -> None:
    """Other incarnations of the same worker."""
    for older in [k for k in known if k[0] == key[0]]:
        del known[older]


def _seconds(link: Link, piece: Piece) -> float:
    started = time.monotonic()
    link.read(piece, TEST_TIMEOUT_S)
    return time.monotonic() - started


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3g}"


def _remember(known: dict[PeerKey, T], key: PeerKey, value: T) -> None:
    if len(known) >= MAX_APART:
        del known[next(iter(known))]
    known[key] = value
