"""A tiny router for tests: speaks WorkerService.Attach over real gRPC, one stream a worker."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import grpc

from paceline.core.errors import PacelineError
from paceline.core.keys import root_key, tenant_salt
from paceline.core.pooling import Pooling
from paceline.core.sampling import SamplingParams
from paceline.rpc import caller_token, tickets
from paceline.rpc.channel import connect
from paceline.rpc.convert import error_from_proto, pooling_to_proto, sampling_to_proto
from paceline.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from tests.support.workers import SECRET


@dataclass(slots=True)
class SlotLog:
    """All that a worker said about one slot."""

    tokens: dict[int, dict[int, int]] = field(default_factory=dict)  # choice → position → token
    finishes: dict[int, int] = field(default_factory=dict)
    emissions: list[common_pb2.Emission] = field(default_factory=list)
    error: PacelineError | None = None
    reserved: worker_pb2.Reserved | None = None
    busy: worker_pb2.Busy | None = None
    ended: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, emission: common_pb2.Emission) -> None:
        self.emissions.append(emission)
        known = self.tokens.setdefault(emission.choice, {})
        for position, token in enumerate(emission.token_ids, emission.position):
            assert position not in known, "a position was emitted twice"
            known[position] = token
        if emission.finish:
            self.finishes[emission.choice] = emission.finish

    def output(self, choice: int = 0) -> list[int]:
        """Tokens in order; fails when one is missing."""
        known = self.tokens.get(choice, {})
        first = min(known, default=0)
        return [known[position] for position in range(first, first + len(known))]

    async def until_ended(self, timeout_s: float = 60.0) -> "SlotLog":
        async with asyncio.timeout(timeout_s):
            while not self.ended:
                await self.changed.wait()
                self.changed.clear()
        return self

    async def until_answered(self, timeout_s: float = 30.0) -> "SlotLog":
        """Reserved, Busy, error or end."""
        async with asyncio.timeout(timeout_s):
            while not (self.ended or self.reserved or self.busy or self.error):
                await self.changed.wait()
                self.changed.clear()
        return self

    async def until_emitted(self, num_tokens: int, timeout_s: float = 30.0) -> "SlotLog":
        async with asyncio.timeout(timeout_s):
            while not self.ended and sum(map(len, self.tokens.values())) < num_tokens:
                await self.changed.wait()
                self.changed.clear()
        return self


Hints = Sequence[worker_pb2.PrefixHint]


def token() -> caller_token.Metadata:
    """Of a caller that belongs to the deployment."""
    return caller_token.metadata(SECRET.encode())


class Attachment:
    """One Attach stream. Beats by itself unless `beats` is False."""

    def __init__(self, endpoint: str, *, beats: bool = True) -> None:
        self.endpoint = endpoint
        self.info = worker_pb2.WorkerInfo()
        self.load = worker_pb2.Load()
        self.links: dict[str, float] = {}  # microseconds a token, by source
        self.num_frames = 0
        self.last_heard = time.monotonic()
        self.closed: asyncio.Event = asyncio.Event()
        self.status: grpc.StatusCode | None = None
        self._slots: dict[int, SlotLog] = {}
        self._numbers = count(1)
        self._channel = connect(endpoint)
        self._outgoing: asyncio.Queue[worker_pb2.WorkerCommand | None] = asyncio.Queue()
        self._beats = beats
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Attachment":
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._call = stub.Attach(self._commands(), metadata=token())
        first = await self._call.read()
        assert isinstance(first, worker_pb2.WorkerFrame), self._call
        self.info = first.info
        self._tasks.append(asyncio.create_task(self._read()))
        if self._beats:
            self._tasks.append(asyncio.create_task(self._beat()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.last_heard

    # --- commands ---

    def run(self, request: common_pb2.TokenRequest, hints: Hints = ()) -> SlotLog:
        slot, log = self._new_slot()
        self.send(run=worker_pb2.RunWhole(slot=slot, request=request, hints=hints))
        return log

    def reserve(self, request: common_pb2.TokenRequest, hold_ms: int = 5000) -> SlotLog:
        slot, log = self._new_slot()
        self.send(reserve=worker_pb2.Reserve(slot=slot, request=request, hold_ms=hold_ms))
        return log

    def prefill(
        self,
        request: common_pb2.TokenRequest,
        ticket: common_pb2.Ticket,
        hints: Hints = (),
        keep_ms: int = 0,
    ) -> SlotLog:
        slot, log = self._new_slot()
        message = worker_pb2.Prefill(slot=slot, request=request, ticket=ticket, hints=hints)
        message.keep_ms = keep_ms
        self.send(prefill=message)
        return log

    def adopt(self, log: SlotLog, ticket: common_pb2.Ticket, source: str) -> None:
        slot = self.slot_of(log)
        self.send(adopt=worker_pb2.Adopt(slot=slot, ticket=ticket, source_endpoint=source))

    def cancel(self, log: SlotLog, choices: Sequence[int] = ()) -> None:
        self.send(cancel=worker_pb2.CancelSlot(slot=self.slot_of(log), choices=choices))

    def send(self, **body: object) -> None:
        self._outgoing.put_nowait(worker_pb2.WorkerCommand(**body))  # type: ignore[arg-type]

    def slot_of(self, log: SlotLog) -> int:
        return next(slot for slot, known in self._slots.items() if known is log)

    def _new_slot(self) -> tuple[int, SlotLog]:
        slot = next(self._numbers)
        log = self._slots[slot] = SlotLog()
        return slot, log

    # --- the stream ---

    async def _commands(self) -> AsyncIterator[worker_pb2.WorkerCommand]:
        while (command := await self._outgoing.get()) is not None:
            yield command

    async def _beat(self) -> None:
        for sequence in count():
            self.send(beat=worker_pb2.Beat(sequence=sequence))
            await asyncio.sleep(0.2)

    async def _read(self) -> None:
        try:
            with contextlib.suppress(grpc.aio.AioRpcError):
                while isinstance(frame := await self._call.read(), worker_pb2.WorkerFrame):
                    self._apply(frame)
            self.status = await self._call.code()
        finally:
            self.closed.set()

    def _apply(self, frame: worker_pb2.WorkerFrame) -> None:
        self.num_frames += 1
        self.last_heard = time.monotonic()
        self.load = frame.load
        if frame.HasField("info"):
            self.info = frame.info
        if frame.links:
            self.links = {link.source: link.token_us for link in frame.links}
        for emission in frame.emissions:
            self._slots[emission.slot].add(emission)
        for failure in frame.errors:
            self._slots[failure.slot].error = error_from_proto(failure.error)
        for reserved in frame.reserved:
            self._slots[reserved.slot].reserved = reserved
        for busy in frame.busy:
            self._slots[busy.slot].busy = busy
        for slot in frame.ended_slots:
            assert not self._slots[slot].ended, "a slot ended twice"
            self._slots[slot].ended = True
        for log in self._slots.values():
            log.changed.set()


def make_request(
    info: worker_pb2.WorkerInfo,
    token_ids: Sequence[int],
    *,
    num_prompt_tokens: int = 0,
    choices: Sequence[int] = (),
    budget_ms: int = 30_000,
    **sampling: object,
) -> common_pb2.TokenRequest:
    """Greedy unless `sampling` says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return common_pb2.TokenRequest(
        request_id=secrets.token_hex(8),
        tenant="tests",
        root_key=root_key(info.content_digest, tenant_salt(SECRET.encode(), "tests")),
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens or len(token_ids),
        sampling=sampling_to_proto(params),
        choices=choices or range(params.n),
        budget_ms=budget_ms,
    )


def make_embedding(
    info: worker_pb2.WorkerInfo, token_ids: Sequence[int], pooling: Pooling
) -> common_pb2.TokenRequest:
    request = make_request(info, token_ids)
    del request.choices[:]
    request.pooling = pooling_to_proto(pooling)
    return request


def make_ticket(
    request: common_pb2.TokenRequest,
    source: worker_pb2.WorkerInfo,
    reader: worker_pb2.WorkerInfo,
    *,
    attempt: int = 1,
    lifetime_s: float = 30.0,
) -> common_pb2.Ticket:
    ticket = common_pb2.Ticket(
        request_id=request.request_id,
        attempt=attempt,
        tenant=request.tenant,
        source_worker=source.worker_id,
        source_incarnation=source.incarnation,
        reader_worker=reader.worker_id,
        reader_incarnation=reader.incarnation,
        content_digest=source.content_digest,
        expires_unix_ms=round((time.time() + lifetime_s) * 1000),
    )
    return tickets.sign(ticket, SECRET.encode())


def make_hint(
    request: common_pb2.TokenRequest,
    source: Attachment,
    reader: Attachment,
    *,
    num_blocks: int | None = None,
    num_own_blocks: int = 0,
    **ticket: object,
) -> worker_pb2.PrefixHint:
    """That `source` holds all full blocks of the request, unless `num_blocks` is given."""
    most = len(request.token_ids) // 16
    return worker_pb2.PrefixHint(
        ticket=make_ticket(request, source.info, reader.info, **ticket),  # type: ignore[arg-type]
        source_endpoint=source.endpoint,
        num_blocks=most if num_blocks is None else num_blocks,
        num_own_blocks=num_own_blocks,
    )


@dataclass(frozen=True, slots=True)
class Split:
    """Both logs of a split request."""

    prefill: SlotLog
    decode: SlotLog

    def output(self, choice: int = 0) -> list[int]:
        """First token from prefill, the rest from decode."""
        return self.prefill.output(choice) + self.decode.output(choice)


async def run_split(
    prefill: Attachment,
    decode: Attachment,
    request: common_pb2.TokenRequest,
    hints: Hints = (),
    **ticket: object,
) -> Split:
    """Reserve, then Prefill and Adopt at once; waits until both sides ended."""
    split = await begin_split(prefill, decode, request, hints, **ticket)
    await asyncio.gather(split.prefill.until_ended(), split.decode.until_ended())
    return split


async def begin_split(
    prefill: Attachment,
    decode: Attachment,
    request: common_pb2.TokenRequest,
    hints: Hints = (),
    **ticket: object,
) -> Split:
    log = await decode.reserve(request).until_answered()
    while log.busy is not None:  # as a router does: wait, and ask again
        await asyncio.sleep(0.02)
        log = await decode.reserve(request).until_answered()
    assert log.reserved is not None, log.error
    made = make_ticket(request, prefill.info, decode.info, **ticket)  # type: ignore[arg-type]
    decode.adopt(log, made, prefill.endpoint)
    return Split(prefill.prefill(request, made, hints), log)
