"""Pulls ranges of blocks of one request: pin at the source, copy in a thread, unpin.

Pages of all page groups are alike: a range may hold blocks of several, copied as one.
Pins of all readers share a bounded part of the source's pool: at that bound a range is asked for
again later, and smaller.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import gt
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import KvUnavailable, Overloaded, PeerGone
from paceline.core.ids import BlockKey
from paceline.engine.messages import GrantedRun
from paceline.kv_transfer.base import CellSums
from paceline.kv_transfer.pull import PinnedPages, pull_verified
from paceline.kv_transfer.uneven_pull import Limits, UnevenRun
from paceline.v1 import common_pb2, kv_pb2
from paceline.worker.block_runs import BlockRun
from paceline.worker.peers import Peer
from paceline.worker.uneven import asked_runs, found_runs, uneven_runs

if TYPE_CHECKING:
    from paceline.worker.session import Session

MAX_RANGE_BLOCKS = 128  # so that a pin is short-lived
MAX_PULL_S = 60.0  # of one range; silence of the source ends it much earlier
MAX_PIN_WAIT_S = 10.0  # of one range, for other readers to unpin
PIN_PAUSE_S = 0.1  # when the source does not say how long

Part = PinnedPages | UnevenRun


@dataclass(frozen=True, slots=True)
class PulledRun:
    group: int
    first_block: int
    checksums: list[list[int]]  # one list a block


class RangePuller:
    """Copies into the pages granted to one request; at most one range is in flight."""

    def __init__(
        self,
        session: "Session",
        peer: Peer,
        granted: Sequence[GrantedRun],
        ticket: common_pb2.Ticket,
        num_tail_tokens: int,
        abort: threading.Event,
    ) -> None:
        self._session = session
        self._peer = peer
        self._granted = granted
        self._ticket = ticket
        self._num_tail_tokens = num_tail_tokens
        self._abort = abort
        self.is_complete = False  # all is here, and the source knows it
        self._loop = asyncio.get_running_loop()
        self._copy: Future[list[CellSums]] | None = None

    @property
    def is_copying(self) -> bool:
        """A copy may be writing."""
        return self._copy is not None and not self._copy.done()

    async def pull(
        self,
        runs: Sequence[BlockRun],
        keys: Sequence[BlockKey],
        *,
        with_tail: bool = False,
        completes: bool = False,
    ) -> AsyncIterator[list[PulledRun]]:
        """The blocks of `runs` in ranges, the tail pages with the last. Yields what is verified.
        `completes`: nothing is wanted after that, and the source is told so with the last unpin.

        Raises KvUnavailable, Unavailable when the source is gone, Overloaded when its pins are
        taken for too long.
        """
        num_pages = MAX_RANGE_BLOCKS
        waits_until = time.monotonic() + MAX_PIN_WAIT_S
        num_tails = len(self._granted)
        while runs or with_tail:
            taken, rest = cut(runs, num_pages)
            num_taken = sum(map(len, taken))
            fits = num_taken == 0 or num_taken + num_tails <= num_pages
            tail = with_tail and not rest and fits
            try:
                is_last = completes and not rest and tail == with_tail
                pulled = await self._pull_range(taken, keys, tail, is_last)
            except Overloaded as error:
                if time.monotonic() > waits_until:
                    raise
                num_pages = max(1, (num_taken + tail * num_tails) // 2)
                await asyncio.sleep(error.retry_after_s or PIN_PAUSE_S)
                continue
            yield pulled
            runs = rest
            with_tail = with_tail and not tail
            waits_until = time.monotonic() + MAX_PIN_WAIT_S

    async def _pull_range(
        self, runs: Sequence[BlockRun], keys: Sequence[BlockKey], tail: bool, is_last: bool
    ) -> list[PulledRun]:
        async with self._session.pull_threads.turn(self._peer.turns):
            pinned = await self._pin(runs, keys, tail)
            return await self._pull_leased(runs, pinned, is_last)

    async def pull_found(
        self, runs: Sequence[BlockRun], keys: Sequence[BlockKey]
    ) -> list[PulledRun]:
        """Of at most MAX_RANGE_BLOCKS blocks what leads of each run and is there. Raises as `pull`
        does, Overloaded at once."""
        async with self._session.pull_threads.turn(self._peer.turns):
            pinned = await self._peer.pin(self._asked(runs, keys))
            found = self._found(runs, pinned)
            if not any(map(len, found)):
                self._unpin(pinned.lease_id)
                return []
            return await self._pull_leased(found, pinned, is_last=False)

    def _found(self, runs: Sequence[BlockRun], pinned: kv_pb2.PinResponse) -> list[BlockRun]:
        """What leads of `runs` and is pinned; nothing if the answer is not to what was asked."""
        uneven, asked = self._peer.uneven, self._asked_runs(runs)
        numbers = [len(run.pages) for run in pinned.runs]
        if len(numbers) != len(asked) or any(map(gt, numbers, map(len, asked))):
            return []
        if uneven is None:
            ends = {run.group: run.start + n for run, n in zip(asked, numbers, strict=True)}
            return [BlockRun(run.group, run.start, ends[run.group]) for run in runs]
        return found_runs(uneven.layouts, runs, pinned)

    async def pull_pinned(
        self, runs: Sequence[BlockRun], rest: kv_pb2.PinResponse, with_tail: bool
    ) -> list[PulledRun] | None:
        """All of `runs` and the tails, by what the source has pinned for us at the end. None, and
        unpinned, if that is not all of it, or would wait for other pulls."""
        pinned = _ends_of(rest, runs)
        threads, turns = self._session.pull_threads, self._peer.turns
        if not (self._is_all(runs, pinned, with_tail) and threads.has_turn(turns)):
            self._unpin(rest.lease_id)
            return None
        async with threads.turn(turns):
            return await self._pull_leased(runs, pinned, is_last=True)

    async def _pull_leased(
        self, runs: Sequence[BlockRun], pinned: kv_pb2.PinResponse, is_last: bool
    ) -> list[PulledRun]:
        beats = self._peer.beats
        beats.hold(pinned.lease_id)
        try:
            sums = await self._read(self._parts(runs, pinned))
            if beats.is_lost(pinned.lease_id):
                raise KvUnavailable("the lease on the source's pages ended during the copy")
            self.is_complete = is_last
        finally:
            beats.drop(pinned.lease_id)
            self._unpin(pinned.lease_id)
        rows = [row for part in sums for row in part.tolist()]
        pulled, first = [], 0
        for run in runs:
            checksums = rows[first : first + len(run)]
            pulled.append(PulledRun(run.group, run.start, checksums))
            first += len(run)
        return pulled

    async def _pin(
        self, runs: Sequence[BlockRun], keys: Sequence[BlockKey], tail: bool
    ) -> kv_pb2.PinResponse:
        pinned = await self._peer.pin(self._asked(runs, keys, tail))
        if self._is_all(runs, pinned, tail):
            return pinned
        self._unpin(pinned.lease_id)
        asked = self._asked_runs(runs)
        found, wanted = sum(len(run.pages) for run in pinned.runs), sum(map(len, asked))
        if found == wanted:
            raise KvUnavailable("the source does not hold the end of the prompt")
        raise KvUnavailable(f"the source holds {found} of {wanted} blocks")

    def _asked(
        self, runs: Sequence[BlockRun], keys: Sequence[BlockKey], tail: bool = False
    ) -> kv_pb2.PinRequest:
        asked = [
            kv_pb2.KeyRun(group=run.group, keys=b"".join(keys[run.start : run.end]))
            for run in self._asked_runs(runs)
        ]
        return kv_pb2.PinRequest(ticket=self._ticket, runs=asked, with_tail=tail)

    def _is_all(self, runs: Sequence[BlockRun], pinned: kv_pb2.PinResponse, tail: bool) -> bool:
        num_tails, num_tokens = self._num_tails() if tail else 0, self._num_tail_tokens
        has_tails = len(pinned.tails) == num_tails and pinned.num_tail_tokens == tail * num_tokens
        asked = self._asked_runs(runs)
        return has_tails and [len(run.pages) for run in pinned.runs] == list(map(len, asked))

    def _asked_runs(self, runs: Sequence[BlockRun]) -> Sequence[BlockRun]:
        """By page groups of the source."""
        uneven = self._peer.uneven
        return runs if uneven is None else asked_runs(uneven.layouts, runs)

    def _num_tails(self) -> int:
        uneven = self._peer.uneven
        return len(self._granted if uneven is None else uneven.layouts.source.windows)

    def _parts(self, runs: Sequence[BlockRun], pinned: kv_pb2.PinResponse) -> Sequence[Part]:
        granted = self._granted
        if self._peer.uneven is not None:
            return uneven_runs(self._peer.uneven.layouts, runs, pinned, granted)
        refs: list[kv_pb2.PageRef] = []
        pages: list[int] = []
        for run, found in zip(runs, pinned.runs, strict=True):
            first = run.start - granted[run.group].first_block
            pages += granted[run.group].pages[first : first + len(run)]
            refs += found.pages
        parts = [self._pinned_pages(refs, pages, None)] if pages else []
        if pinned.num_tail_tokens:
            tails = [run.pages[-1] for run in granted]
            parts.append(self._pinned_pages(list(pinned.tails), tails, pinned.num_tail_tokens))
        return parts

    def _pinned_pages(
        self, refs: Sequence[kv_pb2.PageRef], destination: Sequence[int], num_tokens: int | None
    ) -> PinnedPages:
        num_heads = self._session.connectors.group.num_heads
        if any(len(ref.checksums) != num_heads for ref in refs):
            raise KvUnavailable("the source's checksums are not those of pages like ours")
        return PinnedPages(
            source_pages=np.array([ref.page for ref in refs], np.int64),
            destination_pages=np.array(destination, np.int64),
            generations=np.array([ref.generation for ref in refs], np.uint64),
            checksums=np.array([list(ref.checksums) for ref in refs], np.uint64),
            num_tokens=num_tokens,
        )

    async def _read(self, parts: Sequence[Part]) -> list[CellSums]:
        """In a thread; whoever stops us meanwhile waits for its end (`is_copying`)."""
        self._copy = self._session.pull_threads.submit(lambda: list(map(self._copy_part, parts)))
        try:
            return await asyncio.wrap_future(self._copy)
        except PeerGone:  # the link has failed, for all who read over it
            self._session.peers.forget(self._peer)
            raise
        finally:
            self._session.metrics.pulled(self._peer)

    def _copy_part(self, part: Part) -> CellSums:
        peer, deadline = self._peer, time.monotonic() + MAX_PULL_S
        if isinstance(part, UnevenRun):
            assert peer.uneven is not None
            limits = Limits(deadline, self._abort, self._report)
            return peer.uneven.pull(part, peer.statistics, limits)
        return pull_verified(
            peer.link,
            part,
            peer.statistics,
            deadline=deadline,
            cancelled=self._abort,
            report=self._report,
        )

    def _report(self, page: int, generation: int) -> None:
        """From the copying thread: the source shall hash that page again."""
        request = kv_pb2.ReportRequest(page=page, generation=generation)
        self._loop.call_soon_threadsafe(self._session.background, self._judge, request)

    async def _judge(self, request: kv_pb2.ReportRequest) -> None:
        verdict = await self._peer.report(request)
        self._session.metrics.judged(verdict)
        self._session.peers.judge(self._peer, verdict)

    def _unpin(self, lease_id: str) -> None:
        complete = self.is_complete
        request = kv_pb2.UnpinRequest(ticket=self._ticket, lease_id=lease_id, complete=complete)
        self._session.background(self._peer.unpin, request)


def cut(runs: Sequence[BlockRun], num_blocks: int) -> tuple[Sequence[BlockRun], Sequence[BlockRun]]:
    """The first `num_blocks` blocks of `runs`, and the rest."""
    taken: list[BlockRun] = []
    for i, run in enumerate(runs):
        if len(run) > num_blocks:
            middle = run.start + num_blocks
            if num_blocks:
                taken.append(BlockRun(run.group, run.start, middle))
            return taken, [BlockRun(run.group, middle, run.end), *runs[i + 1 :]]
        taken.append(run)
        num_blocks -= len(run)
    return taken, []


def _ends_of(rest: kv_pb2.PinResponse, runs: Sequence[BlockRun]) -> kv_pb2.PinResponse:
    """Of `rest`, a run a page group, the pages of `runs`: both end with the last full block."""
    parts = [rest.runs[run.group].pages[-len(run) :] for run in runs if run.group < len(rest.runs)]
    return kv_pb2.PinResponse(
        lease_id=rest.lease_id,
        runs=[kv_pb2.PageRun(pages=pages) for pages in parts],
        tails=rest.tails,
        num_tail_tokens=rest.num_tail_tokens,
    )
