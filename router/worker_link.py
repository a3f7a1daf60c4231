"""The router's side of `WorkerService.Attach`: dial, identify, beat, watch, dial again.

A worker's identity is what it says in the first frame of its stream, signed: worker id and
incarnation. An address is only where to dial.
"""

import asyncio
import random
import re
from contextlib import suppress
from typing import Any, Protocol

import grpc
import structlog

from paceline.core.errors import PacelineError
from paceline.router.config import RouterConfig
from paceline.router.outliers import Health
from paceline.router.worker_session import WorkerSession
from paceline.rpc import caller_token, channel, records
from paceline.rpc.status import error_of, tells_end
from paceline.v1 import worker_pb2, worker_pb2_grpc

CHECK_S = 0.1
BACKOFF_S = (0.1, 2.0)  # first and longest pause between dials
QUARANTINE_S = 10.0  # no new work for a worker that got stuck, unless its step loop gets on

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_HEX = re.compile(r"(?:[0-9a-f]{2})+")

log = structlog.stdlib.get_logger("paceline.router")


class Refused(Exception):
    """Who answered is not the worker that the record names."""


class Owner(Protocol):
    """Told what becomes of a link's sessions; never blocks."""

    def session_up(self, session: WorkerSession) -> None: ...
    def session_changed(self, session: WorkerSession) -> None: ...
    def role_changed(self, session: WorkerSession, info: worker_pb2.WorkerInfo) -> None: ...
    def session_lost(self, session: WorkerSession, reason: str) -> None: ...


class WorkerLink:
    """One worker for as long as its record or its stream lives. `session` is None while down."""

    def __init__(self, info: worker_pb2.WorkerInfo, config: RouterConfig, owner: Owner) -> None:
        self.worker_id = info.worker_id
        self.endpoint = info.endpoint
        self.session: WorkerSession | None = None
        self._config = config
        self._secret = config.secret.encode()
        self._owner = owner
        self._incarnation = info.incarnation
        self._health: tuple[str, Health] | None = None  # of the last incarnation
        self._stuck_at: tuple[str, int] | None = None  # incarnation and round
        self.is_gone = False  # what lived there has died, as far as the last dial tells
        self.dialled = asyncio.Event()  # it has answered once, or failed to
        self._redial = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"worker-link-{self.worker_id}")

    def point_to(self, endpoint: str, incarnation: str) -> None:
        """Dial there from now on, at once if one of the two is new. A live stream is kept: it knows
        better than a record."""
        if (endpoint, incarnation) != (self.endpoint, self._incarnation):
            self.endpoint, self._incarnation = endpoint, incarnation
            self._redial.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        pause = BACKOFF_S[0]
        while True:
            self._redial.clear()
            was_up = await self._attach_once()
            pause = BACKOFF_S[0] if was_up else min(2 * pause, BACKOFF_S[1])
            with suppress(TimeoutError):
                async with asyncio.timeout(pause * random.uniform(0.5, 1.0)):
                    await self._redial.wait()
                    pause = BACKOFF_S[0]

    async def _attach_once(self) -> bool:
        """Serves one stream until it ends. True if the worker had identified itself."""
        reason = "closed"
        async with channel.connect(self.endpoint, self._config.tls) as connection:
            stub = worker_pb2_grpc.WorkerServiceStub(connection)  # type: ignore[no-untyped-call]
            call = stub.Attach(metadata=caller_token.metadata(self._secret))
            try:
                self.session = await self._identify(call)
                self.is_gone = False
                self._owner.session_up(self.session)
                self.dialled.set()
                log.info("worker up", worker=self.worker_id, endpoint=self.endpoint)
                await self._serve(call, self.session)
            except grpc.aio.AioRpcError as error:
                reason = error.code().name.lower()
                self.is_gone = tells_end(error)
                why = error_of(error).message
                log.info("worker unreachable", worker=self.worker_id, status=reason, why=why)
            except (Refused, PacelineError) as error:
                reason = "refused"
                log.warning("worker refused", worker=self.worker_id, why=str(error))
            except TimeoutError:
                reason = "silent"
            except Exception:
                reason = "failed"  # a link that ends here would lose its worker for good
                log.exception("worker link failed", worker=self.worker_id)
            finally:
                call.cancel()
                self.dialled.set()
                was_up = self._end_session(reason)
        return was_up

    async def _identify(self, call: Any) -> WorkerSession:
        async with asyncio.timeout(self._config.dead_after_s):
            frame = await call.read()
        if frame is _EOF or not frame.HasField("info"):
            raise Refused("its first frame carries no record")
        info: worker_pb2.WorkerInfo = frame.info
        records.check(info, self._secret)
        if info.worker_id != self.worker_id or info.endpoint != self.endpoint:
            raise Refused("its record names another worker or endpoint")
        if not _HEX.fullmatch(info.content_digest):
            raise Refused(f"content_digest={info.content_digest!r} is not hex")
        session = WorkerSession(info, asyncio.get_running_loop().time())
        session.handle(frame, session.last_frame_at)
        if self._health is not None and self._health[0] == info.incarnation:
            session.health = self._health[1]
        self._health = info.incarnation, session.health
        if self._stuck_at == (info.incarnation, session.load.rounds):
            session.quarantined_until = session.last_frame_at + QUARANTINE_S
        return session

    async def _serve(self, call: Any, session: WorkerSession) -> None:
        tasks = [
            asyncio.create_task(self._read(call, session)),
            asyncio.create_task(self._write(call, session)),
            asyncio.create_task(self._watch(session)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Any, session: WorkerSession) -> None:
        clock = asyncio.get_running_loop().time
        while (frame := await call.read()) is not _EOF and session.lost is None:
            session.handle(frame, clock())
            if frame.HasField("info"):
                self._take_role(session, frame.info)
            self._owner.session_changed(session)
            await asyncio.sleep(0)  # what this frame brought leaves before we ask for the next

    def _take_role(self, session: WorkerSession, info: worker_pb2.WorkerInfo) -> None:
        """Raises Refused or InvalidRequest for what is not of this very worker."""
        records.check(info, self._secret)
        if (info.worker_id, info.incarnation) != (session.worker_id, session.incarnation):
            raise Refused("its new record names another worker or incarnation")
        if info.role_version > session.info.role_version:
            self._owner.role_changed(session, info)

    async def _write(self, call: Any, session: WorkerSession) -> None:
        while True:
            command = await session.outbox.get()
            try:
                await call.write(command)
            except asyncio.InvalidStateError:
                return  # the call has just ended

    async def _watch(self, session: WorkerSession) -> None:
        """Beats; returns when the session has to end."""
        loop = asyncio.get_running_loop()
        next_beat, sequence = loop.time(), 0
        while session.lost is None:
            now = loop.time()
            if now - session.last_frame_at > self._config.dead_after_s:
                session.lose("silent")
            if not session.check_progress(now, self._config.stall_after_s):
                self._stuck_at = (session.info.incarnation, session.load.rounds)
                session.lose("stalled")
            if now >= next_beat:
                next_beat, sequence = now + self._config.beat_s, sequence + 1
                beat = worker_pb2.Beat(sequence=sequence)
                session.send(worker_pb2.WorkerCommand(beat=beat))
            await asyncio.sleep(CHECK_S)

    def _end_session(self, reason: str) -> bool:
        session, self.session = self.session, None
        if session is None:
            return False
        session.lose(reason)
        self._owner.session_lost(session, session.lost or reason)
        log.warning("worker lost", worker=self.worker_id, reason=session.lost)
        return True
