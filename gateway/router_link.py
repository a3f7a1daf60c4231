"""One stream to one router: many requests on it, told apart by slot.

connect ─ first models ─ open ─ draining: no new requests ─ the last one has ended ─┐
   └────────┴──────────────┴─────── stream ends, or is silent ──────────────────────┴─ ended
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import grpc
import structlog

from paceline.gateway.config import GatewayConfig
from paceline.gateway.router_addresses import Address
from paceline.gateway.submission import Part
from paceline.rpc import caller_token
from paceline.rpc.channel import connect
from paceline.rpc.status import error_of
from paceline.v1.control_pb2 import (
    CancelRequest,
    GatewayFrame,
    ModelInfo,
    RouterFrame,
    SubmitRequest,
)
from paceline.v1.control_pb2_grpc import RouterServiceStub

_Call = grpc.aio.StreamStreamCall[GatewayFrame, RouterFrame]
logger = structlog.stdlib.get_logger("paceline.gateway")


class Owner(Protocol):
    """Told what a link hears; never blocks."""

    def take(self, link: "RouterLink", frame: RouterFrame) -> None: ...

    def leave(self, link: "RouterLink") -> None:
        """It takes no new requests from now on."""

    def end(self, link: "RouterLink") -> None:
        """Nothing more will be heard on it. Its parts are still there."""


class RouterLink:
    """Made to be tried: `opened` says whether the router takes requests."""

    def __init__(self, address: Address, config: GatewayConfig, owner: Owner) -> None:
        self.address = address
        self.parts: dict[int, Part] = {}  # by slot
        self.models: Sequence[ModelInfo] = ()
        self.opened: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.is_leaving = False  # drains, or has ended
        self._secret = config.secret.encode()
        self._silence_s = config.links.router_silence_s
        self._tls = config.tls
        self._owner = owner
        self._outbox: deque[GatewayFrame] = deque()
        self._outbox_filled = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="router-link")
        self._task.add_done_callback(self._report)

    @property
    def is_open(self) -> bool:
        return self.opened.done() and self.opened.result() and not self.is_leaving

    @property
    def num_unsent(self) -> int:
        return len(self._outbox)

    def submit(self, part: Part) -> None:
        self.parts[part.slot] = part
        part.link = self
        request = part.submission.for_router(part)
        self._send(GatewayFrame(submit=SubmitRequest(slot=part.slot, request=request)))

    def cancel(self, part: Part, choices: Sequence[int] = ()) -> None:
        """Ends some choices of a part or, without `choices`, the part."""
        if not choices:
            self.forget(part)
        self._send(GatewayFrame(cancel=CancelRequest(slot=part.slot, choices=choices)))

    def forget(self, part: Part) -> None:
        """One that the router has ended, or that has gone elsewhere."""
        del self.parts[part.slot]
        part.link = None
        if self.is_leaving and not self.parts:
            self.close()

    def drain(self) -> None:
        """The router leaves: what runs there may end there."""
        self._leave()
        if not self.parts:
            self.close()

    def close(self) -> None:
        """Ends the stream, soon."""
        self._task.cancel()

    async def closed(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    def _send(self, frame: GatewayFrame) -> None:
        self._outbox.append(frame)
        self._outbox_filled.set()

    async def _run(self) -> None:
        try:
            await self._attach()
        finally:
            if not self.opened.done():
                self.opened.set_result(False)
            self._leave()
            self._owner.end(self)

    def _report(self, task: asyncio.Task[None]) -> None:
        """A fault of ours costs this stream and no more, and is never silent."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("router link failed", router=self.address.endpoint, exc_info=error)

    async def _attach(self) -> None:
        """Serves the stream until it ends."""
        address = self.address
        # Of its own: at the same address another router may be, behind a name of Kubernetes.
        async with connect(
            address.target,
            self._tls,
            authority=address.endpoint,
            is_shared=False,
            connect_s=self._silence_s,
        ) as channel:
            token = caller_token.metadata(self._secret)
            call: _Call = RouterServiceStub(channel).Attach(metadata=token)  # type: ignore[no-untyped-call]
            try:
                async with asyncio.timeout(self._silence_s) as silence:
                    await self._serve(call, silence)
            except TimeoutError:
                self._log("router silent")
            except grpc.aio.AioRpcError as error:
                self._log("router unreachable", error.code().name, error_of(error).message)
            finally:
                self._leave()
                call.cancel()

    async def _serve(self, call: _Call, silence: asyncio.Timeout) -> None:
        clock = asyncio.get_running_loop().time
        writer = asyncio.create_task(self._write(call), name="router-writer")
        try:
            while isinstance(frame := await call.read(), RouterFrame):
                silence.reschedule(clock() + self._silence_s)
                self._take(frame)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def _take(self, frame: RouterFrame) -> None:
        if frame.draining and not self.is_leaving:
            self._log("router draining")
            self.drain()
        if frame.models_changed:
            self.models = list(frame.models)
            if not self.opened.done():
                self._log("router attached")
                self.opened.set_result(True)
        self._owner.take(self, frame)

    def _leave(self) -> None:
        if not self.is_leaving:
            self.is_leaving = True
            self._owner.leave(self)

    async def _write(self, call: _Call) -> None:
        """Ends with the call: the reader sees the same end and reports it."""
        while True:
            await self._outbox_filled.wait()
            self._outbox_filled.clear()
            while self._outbox:
                await call.write(self._outbox.popleft())

    def _log(self, event: str, status: str = "", why: str = "") -> None:
        told = {"status": status, "why": why} if status else {}
        target = self.address.target
        logger.info(event, router=self.address.endpoint, address=target, **told)
