"""A RouterService over real gRPC whose answers are scripted: what a gateway attaches to."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np

from paceline.core.errors import Unavailable
from paceline.rpc.channel import make_server
from paceline.v1 import common_pb2
from paceline.v1.common_pb2 import Emission, PositionLogprobs, SlotError, TokenLogprob, TokenRequest
from paceline.v1.control_pb2 import GatewayFrame, ModelInfo, RouterFrame, SlotSetback
from paceline.v1.control_pb2_grpc import (
    RouterServiceServicer,
    add_RouterServiceServicer_to_server,
)

SECRET = "a secret of the tests"
UNFINISHED = common_pb2.FINISH_REASON_UNSPECIFIED
LENGTH = common_pb2.FINISH_REASON_LENGTH
STOP = common_pb2.FINISH_REASON_STOP
HIDDEN_SIZE = 4


@dataclass
class Reply:
    """What happens to one request: `steps` of token ids, the same for each choice."""

    steps: Sequence[Sequence[int]]
    finish: "common_pb2.FinishReason" = LENGTH
    interval_s: float = 0.0
    delay_s: float = 0.0
    num_cached_tokens: int = 0
    error: common_pb2.Error | None = None  # instead of the finish, after the steps
    is_endless: bool = False  # never finishes by itself
    logprob: float = -0.5
    logprob_of: Callable[[int], float] | None = None  # by choice
    prompt_times: common_pb2.PromptTimes | None = None  # with the first token
    pull_us: int = 0  # with the second
    placement: common_pb2.Placement | None = None  # with the first
    later_placement: common_pb2.Placement | None = None  # with the second
    names_choice: bool = False  # the first token is the choice's digit
    setback: SlotSetback | None = None  # before the first token
    prompt_parts: Sequence[common_pb2.PromptLogprobs] = ()


@dataclass
class Submission:
    """A request as it arrived, and what became of it."""

    slot: int
    request: TokenRequest
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled_choices: set[int] = field(default_factory=set)
    cancelled_at_s: float = 0.0


def bytes_reply(data: bytes, **settings: object) -> Reply:
    """One byte a step: tokens of the byte vocabulary."""
    return Reply([[byte] for byte in data], **settings)  # type: ignore[arg-type]


class FakeRouter(RouterServiceServicer):
    """Start, set `reply`, look at `submissions`, stop. Forced tokens are taken as those of the
    reply, which goes on after them."""

    def __init__(self, models: Sequence[ModelInfo]) -> None:
        self.models = list(models)
        self.reply: Callable[[TokenRequest], Reply] = lambda request: bytes_reply(b"Hello")
        self.submissions: list[Submission] = []
        self.endpoint = ""
        self.is_silent = False  # sends nothing, not even beats
        self.is_draining = False
        self.attach_s = 0.0  # until a gateway hears of the models
        self.num_attached = 0  # streams, ever
        self._hands_over = asyncio.Event()  # what runs
        self._server: grpc.aio.Server | None = None
        self._outboxes: set[asyncio.Queue[RouterFrame | None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self._server = make_server(SECRET.encode())
        add_RouterServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"{host}:{self._server.add_insecure_port(f'{host}:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.stop(None)

    @property
    def num_streams(self) -> int:
        return len(self._outboxes)

    def cut(self) -> None:
        """All streams: what a gateway sees of a router that dies."""
        for outbox in self._outboxes:
            outbox.put_nowait(None)

    def drain(self) -> None:
        """Tells gateways; what runs goes on."""
        self.is_draining = True
        for outbox in self._outboxes:
            outbox.put_nowait(RouterFrame(draining=True))

    def hand_over(self) -> None:
        """What still runs: the time to drain is over."""
        self._hands_over.set()

    def set_models(self, models: Sequence[ModelInfo]) -> None:
        self.models = list(models)
        for outbox in self._outboxes:
            outbox.put_nowait(RouterFrame(models=models, models_changed=True))

    async def Attach(
        self,
        request_iterator: AsyncIterator[GatewayFrame],
        context: "grpc.aio.ServicerContext[GatewayFrame, RouterFrame]",
    ) -> AsyncIterator[RouterFrame]:
        if self.is_draining:
            raise Unavailable("the router is shutting down")
        await asyncio.sleep(self.attach_s)
        self.num_attached += 1
        outbox: asyncio.Queue[RouterFrame | None] = asyncio.Queue()
        outbox.put_nowait(RouterFrame(models=self.models, models_changed=True))
        self._outboxes.add(outbox)
        tasks = self._spawn(self._read(request_iterator, outbox)), self._spawn(_beat(outbox))
        try:
            while frame := await outbox.get():
                while self.is_silent:  # noqa: ASYNC110 (a flag is what tests set)
                    await asyncio.sleep(0.01)
                yield frame
        finally:
            for task in tasks:
                task.cancel()
            self._outboxes.discard(outbox)

    async def _read(
        self, frames: AsyncIterator[GatewayFrame], outbox: "asyncio.Queue[RouterFrame | None]"
    ) -> None:
        slots: dict[int, Submission] = {}
        async for frame in frames:
            if frame.HasField("submit"):
                submission = Submission(frame.submit.slot, frame.submit.request)
                slots[submission.slot] = submission
                self.submissions.append(submission)
                if self.is_draining:
                    outbox.put_nowait(_given_back(submission))
                else:
                    self._spawn(self._answer(submission, outbox))
                continue
            submission = slots[frame.cancel.slot]
            submission.cancelled_at_s = time.monotonic()
            submission.cancelled_choices |= set(frame.cancel.choices)
            if not frame.cancel.choices:
                submission.cancelled.set()

    async def _answer(
        self, submission: Submission, outbox: "asyncio.Queue[RouterFrame | None]"
    ) -> None:
        reply = self.reply(submission.request)
        await asyncio.sleep(reply.delay_s)
        if submission.request.WhichOneof("wanted") == "pooling" and reply.error is None:
            outbox.put_nowait(RouterFrame(emissions=[_embedding(submission, reply)]))
            return
        if reply.setback is not None:
            reply.setback.slot = submission.slot
            outbox.put_nowait(RouterFrame(setbacks=[reply.setback]))
        for part in reply.prompt_parts:
            scored = Emission(slot=submission.slot, prompt_logprobs=part)
            outbox.put_nowait(RouterFrame(emissions=[scored]))
        num_forced = len(submission.request.token_ids) - submission.request.num_prompt_tokens
        positions = dict.fromkeys(submission.request.choices, num_forced)
        for index, token_ids in enumerate(reply.steps[num_forced:]):
            is_last = (
                index == len(reply.steps) - num_forced - 1
                and reply.error is None
                and not reply.is_endless
            )
            emissions = []
            for choice in submission.request.choices:
                if choice in submission.cancelled_choices:
                    continue
                if index + num_forced == 0 and reply.names_choice:
                    token_ids = [ord(str(choice))]
                emission = _emission(submission, reply, choice, positions[choice], token_ids)
                emission.finish = reply.finish if is_last else UNFINISHED
                positions[choice] += len(token_ids)
                emissions.append(emission)
            outbox.put_nowait(RouterFrame(emissions=emissions))
            await asyncio.sleep(reply.interval_s)
            if submission.cancelled.is_set():
                return
            if self._hands_over.is_set():
                outbox.put_nowait(_given_back(submission))
                return
        if reply.error is not None:
            error = SlotError(slot=submission.slot, error=reply.error)
            outbox.put_nowait(RouterFrame(errors=[error]))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _beat(outbox: "asyncio.Queue[RouterFrame | None]") -> None:
    while True:
        await asyncio.sleep(0.2)
        outbox.put_nowait(RouterFrame())


def _given_back(submission: Submission) -> RouterFrame:
    error = common_pb2.Error(code=common_pb2.ERROR_CODE_UNAVAILABLE, message="given back")
    return RouterFrame(errors=[SlotError(slot=submission.slot, error=error, elsewhere=True)])


def embedding_of(request: TokenRequest) -> list[float]:
    """HIDDEN_SIZE numbers that tell prompts and poolings apart."""
    ids = request.token_ids
    return [float(len(ids)), float(sum(ids)), -float(request.pooling), 0.5]


def _embedding(submission: Submission, reply: Reply) -> Emission:
    return Emission(
        slot=submission.slot,
        finish=STOP,
        num_cached_tokens=reply.num_cached_tokens,
        prompt_times=reply.prompt_times,
        placement=reply.placement,
        embedding=np.asarray(embedding_of(submission.request), "<f4").tobytes(),
    )


def _emission(
    submission: Submission, reply: Reply, choice: int, position: int, token_ids: Sequence[int]
) -> Emission:
    emission = Emission(
        slot=submission.slot,
        choice=choice,
        position=position,
        token_ids=token_ids,
        num_cached_tokens=reply.num_cached_tokens if position == 0 else 0,
        emitted_unix_us=time.time_ns() // 1000,
        prompt_times=reply.prompt_times if position == 0 else None,
        pull_us=reply.pull_us if position == 1 else 0,
        placement={0: reply.placement, 1: reply.later_placement}.get(position),
    )
    sampling = submission.request.sampling
    if sampling.HasField("num_logprobs"):
        logprob = reply.logprob if reply.logprob_of is None else reply.logprob_of(choice)
        for token_id in token_ids:
            emission.logprobs.append(_position(token_id, sampling.num_logprobs, logprob))
    return emission


def _position(token_id: int, num_top: int, logprob: float) -> PositionLogprobs:
    top = [TokenLogprob(token_id=(token_id + i) % 256, logprob=logprob - i) for i in range(num_top)]
    if num_top > 1:
        top[-1].logprob = -math.inf  # filtered tokens have none
    return PositionLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=logprob), top=top)
