"""An engine in the place of a router: requests go to it, and its events to their mailboxes."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from functools import partial

from paceline.core.errors import EngineFailure, PacelineError
from paceline.engine.engine import Engine
from paceline.engine.messages import (
    Cancel,
    Embedding,
    Emission,
    Failed,
    PromptScored,
    StepOutput,
    Submit,
)
from paceline.gateway.mailbox import Mailbox
from paceline.offline.engine_thread import EngineThread
from paceline.v1 import common_pb2
from paceline.v1.control_pb2 import ModelInfo
from paceline.worker.frames import embedding_to_proto, emission_to_proto, scores_to_proto
from paceline.worker.requests import to_spec
from paceline.worker.step_events import error_of


class LocalRouter:
    """See gateway/router.py. `loop`: what it is called on, and delivers on."""

    def __init__(self, engine: Engine, model: ModelInfo, loop: asyncio.AbstractEventLoop) -> None:
        self.is_attached = True
        self.models = {model.name: model}
        self._model = model
        self._loop = loop
        self._slots = itertools.count(1)
        self._mailboxes: dict[int, Mailbox] = {}
        self._failure: PacelineError | None = None
        self._thread = EngineThread(
            engine,
            take=lambda output: self._soon(partial(self._deliver, output)),
            fail=lambda error: self._soon(partial(self._fail, error)),
        )

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._thread.stop)

    def submit(self, request: common_pb2.TokenRequest, mailbox: Mailbox) -> int:
        if self._failure is not None:
            raise self._failure
        spec = to_spec(
            request,
            model=self._model.name,
            vocab_size=self._model.vocab_size,
            context_length=self._model.context_length,
        )
        slot = next(self._slots)
        self._mailboxes[slot] = mailbox
        self._thread.handle(Submit(slot, spec))
        return slot

    def cancel(self, slot: int, choices: Sequence[int] = ()) -> None:
        if choices or self._mailboxes.pop(slot, None) is not None:
            self._thread.handle(Cancel(slot, tuple(choices)))

    def forget(self, slot: int) -> None:
        self._mailboxes.pop(slot, None)

    def _soon(self, call: "partial[None]") -> None:
        self._loop.call_soon_threadsafe(call)

    def _deliver(self, output: StepOutput) -> None:
        now_us = time.time_ns() // 1000
        for event in output.events:
            match event:
                case Emission():
                    self._pass_on(emission_to_proto(event, event.slot, now_us))
                case PromptScored():
                    self._pass_on(scores_to_proto(event, event.slot))
                case Embedding():
                    self._pass_on(embedding_to_proto(event, event.slot))
                case Failed():
                    mailbox = self._mailboxes.pop(event.slot, None)
                    if mailbox is not None:
                        mailbox.fail(error_of(event))

    def _pass_on(self, emission: common_pb2.Emission) -> None:
        mailbox = self._mailboxes.get(emission.slot)
        if mailbox is not None and not mailbox.deliver(emission):
            self.cancel(emission.slot)

    def _fail(self, error: EngineFailure) -> None:
        self._failure = error
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
        self._mailboxes.clear()
