"""A scripted worker: speaks WorkerService over a real socket, computes nothing.

Its tokens are a function of (seed, choice, position), so a test can tell a token log that is right
from one with a gap, a repetition or a token of another request. Prefill and decode workers of one
`Cluster` hand over by ticket; what goes wrong is set on the worker's public fields.
"""

import asyncio
import itertools
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import Message

from paceline.rpc import channel, records
from paceline.v1 import common_pb2, worker_pb2, worker_pb2_grpc

SECRET = "a secret of the tests"
DIGEST = "ab" * 32
MODEL = "tiny"
LENGTH = common_pb2.FINISH_REASON_LENGTH


def token_at(seed: int, choice: int, position: int) -> int:
    return zlib.crc32(f"{seed}/{choice}/{position}".encode()) % 32000


def tokens_of(seed: int, choice: int, count: int) -> list[int]:
    return [token_at(seed, choice, position) for position in range(count)]


class Cluster:
    """Hand-offs in flight between its workers, by (request id, attempt)."""

    def __init__(self) -> None:
        self.ready: dict[tuple[str, int], asyncio.Event] = {}

    def handoff(self, ticket: common_pb2.Ticket) -> asyncio.Event:
        return self.ready.setdefault((ticket.request_id, ticket.attempt), asyncio.Event())


@dataclass
class Running:
    """A slot that emits. `next` is the position of the next token, by choice."""

    slot: int
    request: common_pb2.TokenRequest
    next: dict[int, int]
    first_only: bool = False
    handoff: asyncio.Event | None = None
    not_before: float = 0.0


@dataclass
class Stream:
    frames: asyncio.Queue[worker_pb2.WorkerFrame | None] = field(default_factory=asyncio.Queue)
    running: dict[int, Running] = field(default_factory=dict)
    reserved: dict[int, common_pb2.TokenRequest] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    _incarnations = itertools.count(1)

    def __init__(self, worker_id: str, role: worker_pb2.Role, cluster: Cluster) -> None:
        self.worker_id = worker_id
        self.role = role
        self.cluster = cluster
        self.model = MODEL
        self.digest = DIGEST
        self.serving_digest = "cd" * 32
        self.context_length = 8192
        self.hello_s = 0.0  # before the first frame of a stream
        self.step_s = 0.005
        self.prefill_s = 0.0
        self.handoff_s = 0.0
        self.busy = False  # answers Reserve with Busy
        self.silent = False  # sends nothing at all, not even beats
        self.stalled = False  # beats, but its step loop hangs
        self.full = False  # readers hold all pages: what comes waits, so there is no step either
        self.draining = False
        self.deaf_to_adopt = False
        self.deaf_to_roles = False
        self.role_version = 0  # of the roles that it was asked for
        self.holds = False  # prefill: keeps its slot until it is told to let go
        self.fail_with: common_pb2.ErrorCode | None = None  # every new slot, once it would emit
        self.die_after: int | None = None  # tokens
        self.poison: int | None = None  # it dies of a prompt that begins with this
        self.cut_by_poison = False  # or its streams alone break
        self.num_emitted = 0
        self.num_waiting_tokens = 0
        self.num_free_pages = 1000
        self.num_cached_tokens = 0
        self.received: list[worker_pb2.WorkerCommand] = []
        self.streams: list[Stream] = []
        self.info = worker_pb2.WorkerInfo()
        self._port = 0
        self._step = 0
        self._rounds = 0
        self._server: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens, at the same port as before, under a new incarnation."""
        self._server = channel.make_server(SECRET.encode())
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self.info = worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            incarnation=f"inc-{next(self._incarnations)}",
            role=self.role,
            endpoint=f"127.0.0.1:{self._port}",
            model=self.model,
            content_digest=self.digest,
            serving_digest=self.serving_digest,
            context_length=self.context_length,
            vocab_size=32000,
            num_pages=1000,
        )
        records.sign(self.info, SECRET.encode())
        await self._server.start()
        self._tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._beat())]

    async def die(self) -> None:
        """As kill -9 looks from outside: every stream breaks, nothing is said."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await self._server.stop(grace=None)
        self.streams.clear()

    async def _suffer(self) -> None:
        if self.cut_by_poison:
            for stream in self.streams:
                stream.running.clear()
                stream.frames.put_nowait(None)
        else:
            await self.die()

    @property
    def open_slots(self) -> int:
        return sum(len(s.running) + len(s.reserved) + len(s.held) for s in self.streams)

    def commands(self, kind: str) -> list[Any]:
        return [getattr(c, kind) for c in self.received if c.WhichOneof("body") == kind]

    def inject(self, frame: worker_pb2.WorkerFrame) -> None:
        for stream in self.streams:
            stream.frames.put_nowait(frame)

    def take_role(self, role: worker_pb2.Role, version: int, **fields: str) -> None:
        """Tells it on all streams; `fields` are what of the record is another's."""
        info = worker_pb2.WorkerInfo()
        info.CopyFrom(self.info)
        info.role, info.role_version = role, version
        for name, value in fields.items():
            setattr(info, name, value)
        self.inject(worker_pb2.WorkerFrame(info=records.sign(info, SECRET.encode())))

    def give_up(self) -> None:
        """All that runs, as a worker does that leaves or has another role now."""
        error = common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="scripted")
        for stream in self.streams:
            frame = worker_pb2.WorkerFrame(ended_slots=list(stream.running))
            for slot in stream.running:
                frame.errors.add(slot=slot, error=error, elsewhere=True)
            stream.running.clear()
            stream.frames.put_nowait(frame)

    # --- the protocol -------------------------------------------------------------------------

    async def ChangeRole(
        self, request: worker_pb2.ChangeRoleRequest, context: Any
    ) -> AsyncIterator[worker_pb2.RoleState]:
        if self.deaf_to_roles:
            await asyncio.Event().wait()
        self.role_version += 1
        self.take_role(request.role, self.role_version)
        yield worker_pb2.RoleState(role=request.role, version=self.role_version)

    async def Attach(
        self, request_iterator: AsyncIterator[worker_pb2.WorkerCommand], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerFrame]:
        stream = Stream()
        self.streams.append(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            await asyncio.sleep(self.hello_s)
            yield worker_pb2.WorkerFrame(info=self.info, load=self._load())
            while (frame := await stream.frames.get()) is not None:
                if not self.silent:
                    yield frame
        finally:
            reader.cancel()
            if stream in self.streams:
                self.streams.remove(stream)

    async def _read(
        self, commands: AsyncIterator[worker_pb2.WorkerCommand], stream: Stream
    ) -> None:
        async for command in commands:
            self.received.append(command)
            kind = command.WhichOneof("body")
            handler = getattr(self, f"_on_{kind}")
            handler(stream, getattr(command, kind))

    def _on_beat(self, stream: Stream, beat: Message) -> None: ...
    def _on_let_go(self, stream: Stream, let_go: Message) -> None: ...
    def _on_revoke(self, stream: Stream, revoke: Message) -> None: ...

    def _on_run(self, stream: Stream, run: worker_pb2.RunWhole) -> None:
        self._start(stream, run.slot, run.request, self.prefill_s)

    def _on_prefill(self, stream: Stream, prefill: worker_pb2.Prefill) -> None:
        running = self._start(stream, prefill.slot, prefill.request, self.prefill_s)
        running.first_only = True
        running.handoff = self.cluster.handoff(prefill.ticket)

    def _on_reserve(self, stream: Stream, reserve: worker_pb2.Reserve) -> None:
        frame = worker_pb2.WorkerFrame(load=self._load())
        if self.busy:
            frame.busy.add(slot=reserve.slot, num_pages_needed=9, num_pages_free=0)
        else:
            stream.reserved[reserve.slot] = reserve.request
            frame.reserved.add(slot=reserve.slot, num_cached_tokens=0)
        stream.frames.put_nowait(frame)

    def _on_adopt(self, stream: Stream, adopt: worker_pb2.Adopt) -> None:
        if not self.deaf_to_adopt:
            self._tasks.append(asyncio.create_task(self._adopt(stream, adopt)))

    def _on_cancel(self, stream: Stream, cancel: worker_pb2.CancelSlot) -> None:
        slot = cancel.slot
        running = stream.running.get(slot)
        if cancel.choices and running:
            for choice in cancel.choices:
                running.next.pop(choice, None)
            if running.next:
                return
        self._end(stream, slot)

    async def _adopt(self, stream: Stream, adopt: worker_pb2.Adopt) -> None:
        await self.cluster.handoff(adopt.ticket).wait()
        request = stream.reserved.pop(adopt.slot, None)
        if request is not None:
            running = self._start(stream, adopt.slot, request, self.handoff_s)
            for choice in running.next:
                running.next[choice] += 1

    def _start(
        self, stream: Stream, slot: int, request: common_pb2.TokenRequest, delay_s: float
    ) -> Running:
        forced = len(request.token_ids) - request.num_prompt_tokens
        running = Running(slot, request, dict.fromkeys(request.choices, forced))
        running.not_before = asyncio.get_running_loop().time() + delay_s
        stream.running[slot] = running
        return running

    def _end(self, stream: Stream, slot: int) -> None:
        known = stream.running.pop(slot, None) or stream.reserved.pop(slot, None)
        if known is not None or slot in stream.held:
            stream.held.discard(slot)
            stream.frames.put_nowait(worker_pb2.WorkerFrame(ended_slots=[slot], load=self._load()))

    # --- steps --------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if self.stalled or self.full:
                continue
            for stream in list(self.streams):
                frame = worker_pb2.WorkerFrame()
                for running in list(stream.running.values()):
                    self._run_step(stream, running, frame)
                if frame.ByteSize():
                    self._step += 1
                    self._rounds += 1
                    frame.load.CopyFrom(self._load())
                    stream.frames.put_nowait(frame)
            if self.die_after is not None and self.num_emitted >= self.die_after:
                await asyncio.sleep(0.01)  # what was sent before the crash may arrive
                await self.die()
                self.die_after = None  # dead now, its port is free
                return

    def _run_step(self, stream: Stream, running: Running, frame: worker_pb2.WorkerFrame) -> None:
        if asyncio.get_running_loop().time() < running.not_before:
            return
        if self.poison is not None and running.request.token_ids[0] == self.poison:
            self._tasks.append(asyncio.create_task(self._suffer()))
            return
        if self.fail_with is not None:
            error = common_pb2.Error(code=self.fail_with, message="scripted")
            frame.errors.add(slot=running.slot, error=error)
            frame.ended_slots.append(running.slot)
            del stream.running[running.slot]
            return
        for choice, position in list(running.next.items()):
            if self.die_after is not None and self.num_emitted >= self.die_after:
                return
            self._emit(running, choice, position, frame)
        if running.first_only or not running.next:
            del stream.running[running.slot]
            self._after_last(stream, running, frame)

    def _emit(
        self, running: Running, choice: int, position: int, frame: worker_pb2.WorkerFrame
    ) -> None:
        if running.request.WhichOneof("wanted") == "pooling":
            self.num_emitted += 1
            embedding = np.asarray(running.request.token_ids[:4], "<f4").tobytes()
            stop = common_pb2.FINISH_REASON_STOP
            frame.emissions.add(slot=running.slot, finish=stop, embedding=embedding)
            del running.next[choice]
            return
        sampling = running.request.sampling
        if position >= sampling.max_tokens:
            del running.next[choice]
            return
        self.num_emitted += 1
        last = position + 1 >= sampling.max_tokens
        frame.emissions.add(
            slot=running.slot,
            choice=choice,
            position=position,
            token_ids=[token_at(sampling.seed, choice, position)],
            finish=LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED,
            num_cached_tokens=self.num_cached_tokens,
        )
        running.next[choice] = position + 1
        if last:
            del running.next[choice]

    def _after_last(self, stream: Stream, running: Running, frame: worker_pb2.WorkerFrame) -> None:
        if running.handoff is not None:
            running.handoff.set()
        if self.holds and running.first_only:
            stream.held.add(running.slot)
        else:
            frame.ended_slots.append(running.slot)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            self._rounds += not self.stalled
            self.inject(worker_pb2.WorkerFrame(load=self._load()))

    def _load(self) -> worker_pb2.Load:
        num_slots = sum(len(stream.running) for stream in self.streams)
        return worker_pb2.Load(
            num_running=0 if self.full else num_slots,
            num_waiting=num_slots if self.full else 0,
            num_waiting_tokens=self.num_waiting_tokens,
            num_free_pages=self.num_free_pages,
            num_pages=1000,
            step=self._step,
            rounds=self._rounds,
            draining=self.draining,
        )
