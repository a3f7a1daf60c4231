"""The gateway's one stream to a router: many requests on it, told apart by slot.

connect ─ first frame ─ attached ─ stream ends or is silent ─ every slot fails with Unavailable
   └───────────── next endpoint, with back-off ──────────────────────┘
"""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence

import grpc
import structlog

from paceline.core.errors import Overloaded, Unavailable
from paceline.gateway.config import GatewayConfig
from paceline.gateway.mailbox import Mailbox
from paceline.rpc import caller_token
from paceline.rpc.channel import connect
from paceline.rpc.convert import error_from_proto
from paceline.rpc.status import error_of
from paceline.v1.common_pb2 import TokenRequest
from paceline.v1.control_pb2 import (
    CancelRequest,
    GatewayFrame,
    ModelInfo,
    RouterFrame,
    SubmitRequest,
)
from paceline.v1.control_pb2_grpc import RouterServiceStub

_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.1, 2.0
_MAX_OUTBOX = 4096  # submissions not yet written; cancels are bounded by the live slots
_RETRY_AFTER_S = 1.0

_Call = grpc.aio.StreamStreamCall[GatewayFrame, RouterFrame]
logger = structlog.stdlib.get_logger("paceline.gateway")


class RouterClient:
    """Start, submit and cancel, stop. `on_change` is called when models or attachment change."""

    def __init__(self, config: GatewayConfig, on_change: Callable[[], None]) -> None:
        self._endpoints = config.router
        self._secret = config.secret.encode()
        self._silence_s = config.router_silence_s
        self._on_change = on_change
        self._slots = itertools.count(1)
        self._mailboxes: dict[int, Mailbox] = {}
        self._outbox: deque[GatewayFrame] = deque()
        self._outbox_filled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.is_attached = False
        self.models: dict[str, ModelInfo] = {}  # the last list known

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_attached(), name="router-client")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, request: TokenRequest, mailbox: Mailbox) -> int:
        """Sends a request; its emissions go to `mailbox`. Returns the slot, which names it."""
        if not self.is_attached:
            raise Unavailable("no router is reachable", retry_after_s=_RETRY_AFTER_S)
        if len(self._outbox) >= _MAX_OUTBOX:
            raise Overloaded("too many requests wait for the router", retry_after_s=_RETRY_AFTER_S)
        slot = next(self._slots)
        self._mailboxes[slot] = mailbox
        self._send(GatewayFrame(submit=SubmitRequest(slot=slot, request=request)))
        return slot

    def cancel(self, slot: int, choices: Sequence[int] = ()) -> None:
        """Ends some choices of a slot or, without `choices`, the slot. Later frames are dropped."""
        if not choices and self._mailboxes.pop(slot, None) is None:
            return
        self._send(GatewayFrame(cancel=CancelRequest(slot=slot, choices=choices)))

    def forget(self, slot: int) -> None:
        """A slot all of whose choices the router has ended."""
        self._mailboxes.pop(slot, None)

    def _send(self, frame: GatewayFrame) -> None:
        if self.is_attached:
            self._outbox.append(frame)
            self._outbox_filled.set()

    async def _keep_attached(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        for endpoint in itertools.cycle(self._endpoints):
            if await self._attach(endpoint):
                backoff_s = _MIN_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _attach(self, endpoint: str) -> bool:
        """Serves one stream until it ends. False if it never began."""
        async with connect(endpoint) as channel:
            token = caller_token.metadata(self._secret)
            call: _Call = RouterServiceStub(channel).Attach(metadata=token)  # type: ignore[no-untyped-call]
            try:
                async with asyncio.timeout(self._silence_s) as silence:
                    await self._serve(endpoint, call, silence)
            except TimeoutError:
                logger.warning("router_silent", router=endpoint)
            except grpc.aio.AioRpcError as error:
                why = error_of(error).message
                logger.info(
                    "router_unreachable", router=endpoint, status=error.code().name, why=why
                )
            except Exception:  # a client that ends here would never find a router again
                logger.exception("router_client_failed", router=endpoint)
            finally:
                was_attached = self.is_attached
                self._detach()
                call.cancel()
        return was_attached

    async def _serve(self, endpoint: str, call: _Call, silence: asyncio.Timeout) -> None:
        clock = asyncio.get_running_loop().time
        writer = asyncio.create_task(self._write(call), name="router-writer")
        try:
            while isinstance(frame := await call.read(), RouterFrame):
                silence.reschedule(clock() + self._silence_s)
                if not self.is_attached:
                    self.is_attached = True
                    logger.info("router_attached", router=endpoint)
                self._dispatch(frame)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            if self.is_attached:
                logger.warning("router_detached", router=endpoint)

    async def _write(self, call: _Call) -> None:
        """Ends with the call: the reader sees the same end and reports it."""
        while True:
            await self._outbox_filled.wait()
            self._outbox_filled.clear()
            while self._outbox:
                await call.write(self._outbox.popleft())

    def _dispatch(self, frame: RouterFrame) -> None:
        for emission in frame.emissions:
            mailbox = self._mailboxes.get(emission.slot)
            if mailbox is not None and not mailbox.deliver(emission):
                self.cancel(emission.slot)
        for failed in frame.errors:
            mailbox = self._mailboxes.pop(failed.slot, None)
            if mailbox is not None:
                mailbox.fail(error_from_proto(failed.error))
        if frame.models_changed:
            self._set_models(frame)

    def _set_models(self, frame: RouterFrame) -> None:
        self.models = {model.name: model for model in frame.models}
        self._on_change()

    def _detach(self) -> None:
        """Requests in flight end here; going on at another router would start at this place."""
        self.is_attached = False
        self._outbox.clear()
        error = Unavailable("the router was lost", retry_after_s=_RETRY_AFTER_S)
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
        self._mailboxes.clear()
        self._on_change()
