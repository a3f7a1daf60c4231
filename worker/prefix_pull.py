"""Pages of one slot from another worker that holds them in its prefix cache.

    connect, if there is no link yet → Pin what leads by name → copy and verify (thread) → Unpin …

A pull is over when it takes as long as computing would: a copy that is late then goes on alone, and
nobody waits for it. What fails here is a miss.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from paceline.core.errors import (
    Cancelled,
    IncompatiblePeer,
    KvMismatch,
    KvUnavailable,
    Overloaded,
    PacelineError,
    PeerGone,
)
from paceline.core.keys import chain_keys
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine import messages
from paceline.worker.block_runs import BlockRun
from paceline.worker.page_fill import Tell, Wanted
from paceline.worker.prefix_offers import Offer
from paceline.worker.pull_choice import Outcome
from paceline.worker.ranges import MAX_RANGE_BLOCKS, RangePuller, cut

if TYPE_CHECKING:
    from paceline.worker.session import Session
    from paceline.worker.slots import SlotState


class PrefixPull:
    """Of what was offered to the engine for this slot; `granted` says where it goes."""

    def __init__(
        self,
        session: "Session",
        slot: "SlotState",
        offer: Offer,
        granted: Sequence[messages.GrantedRun],
    ) -> None:
        self._session = session
        self._slot = slot
        self._offer = offer
        self._granted = granted
        self._abort = threading.Event()
        self._puller: RangePuller | None = None
        self._task: asyncio.Task[Outcome] | None = None
        self._num_pages = 0
        self._connected_s = 0.0  # that connecting took
        self._came: set[int] = set()  # blocks, of one page group at least

    @property
    def is_copying(self) -> bool:
        return self._puller is not None and self._puller.is_copying

    async def pull(self, wanted: Sequence[Wanted], tell: Tell) -> None:
        started = time.monotonic()
        num_blocks = len({one.block for one in wanted})
        self._task = asyncio.create_task(self._pull(wanted, tell))
        await asyncio.wait((self._task,), timeout=self._offer.timeout_s(num_blocks))
        is_late = not self._task.done()
        if is_late:
            self.stop()
        elif self._task.cancelled():
            raise Cancelled("the fill was stopped")
        outcome = Outcome.LATE if is_late else self._task.result()
        took_s = time.monotonic() - started
        if self._slot.trace is not None:
            self._slot.trace.adopts(self._offer.source[0])
            self._slot.trace.pulled(took_s)
        self._slot.num_pulled_tokens = len(self._came) * PAGE_TOKENS
        offers = self._session.prefix_offers
        offers.pulled(self._offer, outcome, num_blocks, len(self._came))
        offers.learn(self._offer, outcome, took_s - self._connected_s, self._num_pages)

    def stop(self) -> None:
        self._abort.set()
        if self._task is not None and not self.is_copying:
            self._task.cancel()

    async def finished(self) -> None:
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _pull(self, wanted: Sequence[Wanted], tell: Tell) -> Outcome:
        try:
            return await self._pull_ranges(wanted, tell)
        except Cancelled:
            raise
        except (IncompatiblePeer, Overloaded):
            return Outcome.REFUSED
        except (KvMismatch, PeerGone):
            return Outcome.FAILED
        except KvUnavailable:
            return Outcome.MISSING
        except (PacelineError, grpc.aio.AioRpcError):
            return Outcome.FAILED

    async def _pull_ranges(self, wanted: Sequence[Wanted], tell: Tell) -> Outcome:
        session, hint, request = self._session, self._offer.hint, self._slot.request
        keys = self._slot.keys or await asyncio.to_thread(
            chain_keys, request.root_key, request.token_ids
        )
        started = time.monotonic()
        peer = await session.peers.get(hint.ticket, hint.source_endpoint)
        self._connected_s = time.monotonic() - started
        self._puller = RangePuller(session, peer, self._granted, hint.ticket, 0, self._abort)
        runs: Sequence[BlockRun] = runs_of(wanted)
        while runs:
            first, later = one_a_group(runs)
            taken, rest = cut(first, MAX_RANGE_BLOCKS)
            runs = [*rest, *later]
            pulled = await self._puller.pull_found(taken, keys)
            if self._abort.is_set():
                raise Cancelled("the pull was stopped")
            for run in pulled:
                tell(messages.Pulled(self._slot.number, run.group, run.first_block, run.checksums))
                self._num_pages += len(run.checksums)
                self._came.update(range(run.first_block, run.first_block + len(run.checksums)))
            if sum(len(run.checksums) for run in pulled) < sum(map(len, taken)):
                return Outcome.MISSING
        return Outcome.PULLED


def runs_of(wanted: Sequence[Wanted]) -> list[BlockRun]:
    """`wanted` in order, neighbours as one."""
    runs: list[BlockRun] = []
    for one in wanted:
        if runs and (runs[-1].group, runs[-1].end) == (one.group, one.block):
            runs[-1] = BlockRun(one.group, runs[-1].start, one.block + 1)
        else:
            runs.append(BlockRun(one.group, one.block, one.block + 1))
    return runs


def one_a_group(runs: Sequence[BlockRun]) -> tuple[Sequence[BlockRun], Sequence[BlockRun]]:
    """Leading runs that a source takes at once, and the others: a tier may have left holes."""
    groups: set[int] = set()
    for i, run in enumerate(runs):
        if run.group in groups:
            return runs[:i], runs[i:]
        groups.add(run.group)
    return runs, []
