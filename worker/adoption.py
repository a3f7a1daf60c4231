"""Reader side of a hand-off: follows the source's progress, pulls what is new, joins the batch.

    Progress ─ enough is committed → Pin → copy and verify (thread) → Pulled → Unpin
             └ record, rest and tail pinned or Pin → copy → Pulled, Adopt → Unpin with the ticket

A failure at any point ends the slot: with InvalidRequest if the request itself failed there,
IncompatiblePeer if this worker can never read from that source, Overloaded if its pins were
taken, else KvUnavailable. The router plans again, unless the request is at fault; what was pulled
stays in the prefix cache. A copy in flight is waited for, whoever ends the slot.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import structlog

from paceline.core.errors import (
    EngineFailure,
    IncompatiblePeer,
    InvalidRequest,
    KvUnavailable,
    Overloaded,
    PacelineError,
)
from paceline.core.ids import BlockKey
from paceline.core.keys import chain_keys, tenant_digest
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine import messages
from paceline.rpc.convert import error_from_proto, finish_from_proto
from paceline.rpc.status import error_of
from paceline.v1 import common_pb2, kv_pb2
from paceline.worker.block_runs import BlockRun
from paceline.worker.peers import Peer
from paceline.worker.ranges import PulledRun, RangePuller

if TYPE_CHECKING:
    from paceline.worker.session import Session
    from paceline.worker.slots import SlotState

_log = structlog.get_logger("paceline.worker")

# Link time of what is committed before it is pulled while the source still computes: less is hidden
# than the calls cost both sides (3 ms of two cores that compute; TTFT of 1024 tokens 7 % higher).
WORTH_PULLING_S = 0.002

KNOWN_SIDECARS: frozenset[str] = frozenset()


class Adoption:
    """Starts at once, as a task. `stop` ends it from outside, `finished` waits for its end. The
    session knows it until then: its slot may end before a copy does."""

    def __init__(
        self, session: "Session", slot: "SlotState", ticket: common_pb2.Ticket, endpoint: str
    ) -> None:
        assert slot.reserved is not None
        self._session = session
        self._slot = slot
        self._reserved = slot.reserved
        self._ticket = ticket
        self._endpoint = endpoint
        self._next_blocks = [run.first_block for run in slot.reserved.runs]  # to pull, by group
        self._abort = threading.Event()
        self._puller: RangePuller | None = None
        self._owes_close = False
        self._began_s = time.monotonic()
        self._first_s = self._last_s = 0.0  # when pages were verified; 0: none yet
        self._task = asyncio.create_task(self._run())
        session.adoptions.add(self)
        self._task.add_done_callback(lambda _: session.adoptions.discard(self))

    def stop(self) -> bool:
        """True while a copy into the slot's pages is in flight: `TransferClosed` follows it."""
        self._abort.set()
        if self._task.done() or self._task is asyncio.current_task():
            return False
        if self._puller is not None and self._puller.is_copying:
            self._owes_close = True  # `_run` goes on until the copy has ended
            return True
        self._task.cancel()
        return False

    async def finished(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._follow()
        except asyncio.CancelledError:
            if self._task.cancelling() and not self._abort.is_set():
                raise
            self._fail(KvUnavailable("the link to the source was closed"))  # for all who read
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure)
            is_ours = isinstance(error, InvalidRequest)  # of a call, not of the request
            self._fail(KvUnavailable(error.message) if is_ours else error)
        except PacelineError as error:
            self._fail(error)
        except Exception:  # whatever breaks a hand-off, its slot must end
            ticket = self._ticket
            tenant = tenant_digest(self._session.secret, ticket.tenant)
            why = "a hand-off failed for a reason of ours"
            _log.exception(why, request_ids=[ticket.request_id], tenant=tenant)
            self._fail(EngineFailure("the worker could not pull"))
        finally:
            if self._owes_close:
                self._session.send(messages.TransferClosed(self._slot.number))

    def _fail(self, error: PacelineError) -> None:
        if self._abort.is_set():
            return
        self._session.metrics.failures.inc()
        if not isinstance(error, IncompatiblePeer | InvalidRequest | Overloaded):
            error = KvUnavailable(f"hand-off: {error.message}")
        self._session.end(self._slot, error)

    async def _follow(self) -> None:
        request = self._slot.request
        hashing = asyncio.to_thread(chain_keys, request.root_key, request.token_ids)
        connecting = self._session.peers.get(self._ticket, self._endpoint)
        keys, peer = await asyncio.gather(hashing, connecting)
        self._session.metrics.asked_of_others(self._num_wanted_tokens)
        num_tail_tokens = len(request.token_ids) % PAGE_TOKENS
        self._puller = RangePuller(
            self._session, peer, self._reserved.runs, self._ticket, num_tail_tokens, self._abort
        )
        last = await self._follow_progress(peer, keys)
        await self._complete(peer, keys, last)

    async def _follow_progress(self, peer: Peer, keys: list[BlockKey]) -> kv_pb2.ProgressEvent:
        """Returns the event that brings the record."""
        call = peer.progress(self._ticket, self._next_blocks)
        try:
            async for event in call:
                if event.HasField("error"):
                    raise error_from_proto(event.error)
                if event.HasField("record"):
                    return event
                end = min(event.num_committed_blocks, len(keys))
                num_pages = sum(map(len, self._missing(end)))
                if peer.statistics.link_seconds(num_pages) > WORTH_PULLING_S:
                    await self._pull_to(end, keys)
        finally:
            call.cancel()
        raise KvUnavailable("the source ended its progress without a record")

    async def _pull_to(self, end: int, keys: list[BlockKey], **options: bool) -> None:
        """Pulls blocks up to `end`, in ranges, and tells the engine of each."""
        assert self._puller is not None
        with self._timed():
            async for pulled in self._puller.pull(self._missing(end), keys, **options):
                self._tell(pulled)

    async def _pull_rest(self, keys: list[BlockKey], rest: kv_pb2.PinResponse) -> None:
        """Pulls all that is still missing, at once if the source has pinned just that."""
        assert self._puller is not None
        with_tail = len(self._slot.request.token_ids) % PAGE_TOKENS > 0
        if rest.lease_id:
            with self._timed():
                pulled = await self._puller.pull_pinned(self._missing(len(keys)), rest, with_tail)
            if pulled is not None:
                self._tell(pulled)
                return
        await self._pull_to(len(keys), keys, with_tail=with_tail, completes=True)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            took_s = time.monotonic() - started
            self._slot.pulled_s += took_s
            if self._slot.trace is not None:
                self._slot.trace.pulled(took_s)

    def _missing(self, end: int) -> list[BlockRun]:
        """What is not here yet of the blocks before `end`."""
        return [
            BlockRun(group, start, end)
            for group, start in enumerate(self._next_blocks)
            if start < end
        ]

    def _tell(self, pulled: list[PulledRun]) -> None:
        if self._abort.is_set():
            raise asyncio.CancelledError
        self._last_s = time.monotonic()
        self._first_s = self._first_s or self._last_s
        for run in pulled:
            parts = (run.group, run.first_block, run.checksums)
            self._session.send(messages.Pulled(self._slot.number, *parts))
            self._next_blocks[run.group] += len(run.checksums)

    async def _complete(self, peer: Peer, keys: list[BlockKey], last: kv_pb2.ProgressEvent) -> None:
        first_tokens = self._checked(last.record)
        prompt_done_s = time.monotonic()
        if any(f.finish is None for f in first_tokens if f.choice in self._slot.wanted):
            await self._pull_rest(keys, last.rest)
            self._count(prompt_done_s)
        self._session.send(messages.Adopt(self._slot.number, first_tokens))
        if self._puller is None or not self._puller.is_complete:
            lease_id = last.rest.lease_id
            complete = kv_pb2.UnpinRequest(ticket=self._ticket, lease_id=lease_id, complete=True)
            self._session.background(peer.unpin, complete)

    def _count(self, prompt_done_s: float) -> None:
        """Of a hand-off whose KV is all here."""
        metrics = self._session.metrics
        metrics.had_of_others(self._num_wanted_tokens)
        if self._last_s:
            metrics.first_byte.observe(self._first_s - self._began_s)
            metrics.last_byte.observe(self._last_s - self._began_s)
            metrics.pull_wait.observe(max(0.0, self._last_s - prompt_done_s))

    @property
    def _num_wanted_tokens(self) -> int:
        num_cached = self._reserved.num_cached_blocks * PAGE_TOKENS
        return max(0, len(self._slot.request.token_ids) - num_cached)

    def _checked(self, record: kv_pb2.HandoffRecord) -> list[messages.FirstToken]:
        """Raises KvUnavailable for a record that does not fit the request reserved here."""
        request = self._slot.request
        unknown = set(record.sidecars) - KNOWN_SIDECARS
        if unknown:
            raise KvUnavailable(f"unknown sidecar {sorted(unknown)[0][:40]!r}")
        if record.num_tokens != len(request.token_ids):
            reason = f"the source holds {record.num_tokens} tokens of {len(request.token_ids)}"
            raise KvUnavailable(reason)
        first_tokens = [
            messages.FirstToken(item.choice, item.token_id, finish_from_proto(item.finish))
            for item in record.first_tokens
        ]
        choices = {first.choice for first in first_tokens}  # less those cancelled meanwhile
        unique = len(choices) == len(first_tokens)
        if not (unique and self._slot.wanted <= choices <= set(request.choices)):
            raise KvUnavailable("the source's first tokens are not those of the choices asked for")
        if any(first.token_id >= self._session.info.vocab_size for first in first_tokens):
            raise KvUnavailable("a first token is outside the vocabulary")
        return first_tokens
