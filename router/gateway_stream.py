"""RouterService. Of `Attach`, the router's side: many requests of one gateway on one stream.

What a worker's step brings for this gateway leaves in one frame: callbacks only append, and the
writer takes all that has gathered when it gets its turn.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from paceline.core.errors import InvalidRequest, Overloaded, PacelineError, Unavailable
from paceline.router.config import RouterConfig
from paceline.router.coordinator import Coordinator
from paceline.router.operator_calls import OperatorCalls
from paceline.router.request import GivenBack, Request, WorkerLife
from paceline.rpc import convert
from paceline.v1 import common_pb2, control_pb2, control_pb2_grpc, worker_pb2

MAX_FRAME_EMISSIONS = 2048
MAX_FRAME_BYTES = 1 << 20  # of emissions; one may be larger
MAX_OUTBOX_EMISSIONS = 1 << 16  # then, or with so many bytes, the gateway is taken for dead
MAX_OUTBOX_BYTES = 64 << 20


class GatewayStream:
    """A Sink: requests of this stream write here. `models`: None while they are not known."""

    def __init__(self, models: list[control_pb2.ModelInfo] | None) -> None:
        self.requests: dict[int, Request] = {}
        self.overflow = asyncio.Event()
        self._frame = control_pb2.RouterFrame(models=models, models_changed=models is not None)
        self._emissions: list[common_pb2.Emission] = []
        self._sizes: list[int] = []  # bytes of each
        self._num_bytes = 0
        self._ready = asyncio.Event()
        self._ready.set()

    def emit(self, emission: common_pb2.Emission) -> None:
        size = emission.ByteSize()
        self._emissions.append(emission)
        self._sizes.append(size)
        self._num_bytes += size
        self._ready.set()
        if len(self._emissions) > MAX_OUTBOX_EMISSIONS or self._num_bytes > MAX_OUTBOX_BYTES:
            self.overflow.set()

    def fail(self, slot: int, error: PacelineError) -> None:
        elsewhere = isinstance(error, GivenBack)
        self._frame.errors.add(slot=slot, error=convert.error_to_proto(error), elsewhere=elsewhere)
        self._ready.set()

    def set_back(self, slot: int, num_failures: int, lost: WorkerLife | None) -> None:
        setback = self._frame.setbacks.add(slot=slot, num_failures=num_failures)
        if lost is not None:
            setback.lost.worker_id, setback.lost.incarnation = lost
        self._ready.set()

    def set_models(self, models: list[control_pb2.ModelInfo]) -> None:
        del self._frame.models[:]
        self._frame.models.extend(models)
        self._frame.models_changed = True
        self._ready.set()

    def say_draining(self) -> None:
        self._frame.draining = True
        self._ready.set()

    async def beat(self, interval_s: float) -> None:
        """Lets a frame leave now and then, empty or not: silence means a dead router."""
        while True:
            await asyncio.sleep(interval_s)
            self._ready.set()

    async def frames(self) -> AsyncIterator[control_pb2.RouterFrame]:
        while True:
            await self._ready.wait()
            yield self._take_frame()

    def _take_frame(self) -> control_pb2.RouterFrame:
        """Errors leave after all emissions before them."""
        count = self._num_that_fit()
        if count < len(self._emissions):
            return control_pb2.RouterFrame(emissions=self._take(count))
        frame, self._frame = self._frame, control_pb2.RouterFrame()
        frame.emissions.extend(self._take(count))
        self._ready.clear()
        return frame

    def _num_that_fit(self) -> int:
        """Into one frame."""
        most = min(len(self._emissions), MAX_FRAME_EMISSIONS)
        if self._num_bytes <= MAX_FRAME_BYTES:
            return most
        totals = itertools.accumulate(self._sizes[:most])
        return max(1, sum(total <= MAX_FRAME_BYTES for total in totals))

    def _take(self, count: int) -> list[common_pb2.Emission]:
        taken = self._emissions[:count]
        self._num_bytes -= sum(self._sizes[:count])
        del self._emissions[:count], self._sizes[:count]
        return taken


class RouterServicer(control_pb2_grpc.RouterServiceServicer):
    def __init__(
        self, config: RouterConfig, coordinator: Coordinator, operator_calls: OperatorCalls
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._operator_calls = operator_calls
        self._streams: set[GatewayStream] = set()
        self._models: list[control_pb2.ModelInfo] | None = None

    def set_models(self, models: list[control_pb2.ModelInfo]) -> None:
        """From the first time on gateways take this router for one that serves."""
        self._models = models
        for stream in self._streams:
            stream.set_models(models)

    def say_draining(self) -> None:
        """Gateways go to another router; their running requests stay."""
        for stream in self._streams:
            stream.say_draining()

    async def Attach(
        self, request_iterator: AsyncIterator[control_pb2.GatewayFrame], context: Any
    ) -> None:
        if self._coordinator.draining:
            raise Unavailable("the router is shutting down")
        stream = GatewayStream(self._models)
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        tasks = [
            reader,
            asyncio.create_task(self._write(stream, context)),
            asyncio.create_task(stream.beat(self._config.beat_s)),
            asyncio.create_task(stream.overflow.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if stream.overflow.is_set():
                raise Overloaded("the gateway reads too slowly", retry_after_s=1)
            if reader.done():
                reader.result()  # a bug of ours: let it be seen
        finally:
            self._streams.discard(stream)
            for request in list(stream.requests.values()):
                self._coordinator.cancel(request, set())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def Explain(
        self, request: control_pb2.ExplainRequest, context: Any
    ) -> control_pb2.ExplainResponse:
        last = self._coordinator.decisions.last(request.num_decisions, request.request_id)
        return control_pb2.ExplainResponse(
            decisions=[decision.to_proto() for decision in last],
            quarantined=self._coordinator.suspects.quarantine.to_proto(),
        )

    async def Workers(
        self, request: control_pb2.WorkersRequest, context: Any
    ) -> control_pb2.WorkersResponse:
        queue = self._coordinator.queue
        return control_pb2.WorkersResponse(
            workers=self._operator_calls.workers(),
            num_queued=len(queue),
            num_queued_tokens=queue.num_tokens,
            num_queued_by_digest=self._coordinator.num_queued_by_digest(),
        )

    async def ChangeRole(
        self, request: worker_pb2.ChangeRoleRequest, context: Any
    ) -> AsyncIterator[worker_pb2.RoleState]:
        async with aclosing(self._operator_calls.change_role(request)) as states:
            async for state in states:
                yield state

    async def _read(
        self, frames: AsyncIterator[control_pb2.GatewayFrame], stream: GatewayStream
    ) -> None:
        async for frame in frames:
            kind = frame.WhichOneof("body")
            if kind == "submit":
                self._submit(stream, frame.submit)
            elif kind == "cancel" and (request := stream.requests.get(frame.cancel.slot)):
                self._coordinator.cancel(request, set(frame.cancel.choices))

    def _submit(self, stream: GatewayStream, submit: control_pb2.SubmitRequest) -> None:
        slot = submit.slot
        try:
            if used := stream.requests.get(slot):
                self._coordinator.cancel(used, set())
                raise InvalidRequest("slot", slot, "is in use: both requests end")
            limit_s = self._config.request_limit_s
            request = Request(slot, submit.request, stream, limit_s)
            self._coordinator.submit(request, lambda: stream.requests.pop(slot, None))
        except PacelineError as error:
            stream.fail(slot, error)
        else:
            stream.requests[slot] = request

    async def _write(self, stream: GatewayStream, context: Any) -> None:
        async for frame in stream.frames():
            await context.write(frame)
