"""What end-to-end tests share: requests as token ids, and what one engine alone would answer."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.loadgen import TIMING, Call
from paceline.core.pooling import Pooling
from paceline.core.sampling import SamplingParams
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import (
    Embedding,
    Emission,
    Ended,
    Event,
    PositionLogprobs,
    PromptScored,
    RequestSpec,
    Submit,
)
from paceline.engine.pools import allocate_pools, pool_memory
from paceline.models.loader import load_model


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    """Ids of visible words; other salts have no prefix in common."""
    return [300 + (salt * 7919 + i * i * 31 + i * 17) % 3000 for i in range(num_tokens)]


def streaming(model: Path, token_ids: list[int], **fields: Any) -> Call:
    body = {"model": model.name, "prompt": token_ids, "stream": True, **fields}
    body["stream_options"] = {"include_usage": True}
    return Call(body, headers=TIMING, timeout_s=60)


class Alone:
    """One engine in this process that computes every request whole, one after the other."""

    def __init__(self, folder: Path, num_pages: int = 512) -> None:
        torch.set_num_threads(1)
        model = load_model(folder).model
        pools = allocate_pools(model.layout, num_pages, "cpu")
        self._engine = Engine(model, EngineConfig(), pools, pool_memory(pools[0]))
        self._num_slots = 0

    def answer(self, token_ids: list[int], **sampling: Any) -> list[list[int]]:
        """Tokens of each choice."""
        events = self._events(token_ids, SamplingParams(**sampling))
        emissions = [event for event in events if isinstance(event, Emission)]
        choices = range(sampling.get("n", 1))
        return [[i for e in emissions if e.choice == c for i in e.token_ids] for c in choices]

    def logprobs(self, token_ids: list[int], **sampling: Any) -> list[PositionLogprobs]:
        """Of the output of one choice."""
        events = self._events(token_ids, SamplingParams(**sampling))
        return [p for event in events if isinstance(event, Emission) for p in event.logprobs]

    def scores(self, token_ids: list[int], num_top: int) -> list[PositionLogprobs]:
        """Of the prompt's tokens from the second on."""
        events = self._events(token_ids, SamplingParams(num_prompt_logprobs=num_top, max_tokens=1))
        return [s for event in events if isinstance(event, PromptScored) for s in event.scores]

    def embedding(self, token_ids: list[int], pooling: str) -> NDArray[np.float32]:
        """Not normalised."""
        events = self._events(token_ids, SamplingParams(max_tokens=1), Pooling(pooling))
        (found,) = [event for event in events if isinstance(event, Embedding)]
        return np.frombuffer(found.vector, "<f4")

    def _events(
        self, token_ids: list[int], params: SamplingParams, pooling: Pooling | None = None
    ) -> list[Event]:
        self._num_slots += 1
        name, choices = f"alone-{self._num_slots}", tuple(range(params.n))
        spec = RequestSpec(
            name, token_ids, len(token_ids), bytes(32), params, choices, pooling=pooling
        )
        self._engine.handle(Submit(self._num_slots, spec))
        events: list[Event] = []
        while not any(isinstance(event, Ended) for event in events):
            output = self._engine.step()
            assert output is not None
            events += output.events
        return events
