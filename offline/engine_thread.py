"""Steps an engine in a thread of its own."""

import threading
from collections.abc import Callable

import structlog
import torch

from paceline.core.errors import EngineFailure
from paceline.engine.compute_stream import use_compute_stream
from paceline.engine.engine import Engine
from paceline.engine.messages import Command, StepOutput

_IDLE_S = 0.005  # waiting requests, no pages: somebody may give them back without a command

logger = structlog.stdlib.get_logger("paceline.offline")


class EngineThread:
    """`take` gets each output, `fail` the engine's end if it fails; both in its thread."""

    def __init__(
        self,
        engine: Engine,
        take: Callable[[StepOutput], None],
        fail: Callable[[EngineFailure], None],
    ) -> None:
        self._engine = engine
        self._take = take
        self._fail = fail
        self._woken = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Waits for the step that runs."""
        self._is_stopping = True
        self._woken.set()
        self._thread.join()

    def handle(self, command: Command) -> None:
        """Takes effect at once, from any thread."""
        self._engine.handle(command)
        self._woken.set()

    def _run(self) -> None:
        use_compute_stream(self._engine.runner.device)
        try:
            with torch.inference_mode():
                while not self._is_stopping:
                    self._step()
        except Exception:  # the edge of the thread: whoever waits for it must hear of it
            logger.exception("engine failed")
            self._fail(EngineFailure("the engine has failed"))

    def _step(self) -> None:
        self._woken.clear()
        self._engine.advance()
        output = self._engine.take_output()
        if output is not None:
            self._take(output)
        elif not self._is_stopping:
            self._woken.wait(_IDLE_S if self._engine.has_work() else None)
