"""Engines over the mock model, whose next token is a hash of all KV bytes that it reads."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.pooling import Pooling
from paceline.core.sampling import LogitsProcessorCall, SamplingParams
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine, LaunchedStep
from paceline.engine.messages import (
    CheckIntegrity,
    Command,
    Embedding,
    Emission,
    Ended,
    Event,
    Failed,
    Integrity,
    PositionLogprobs,
    PromptScored,
    RequestSpec,
    StepOutput,
    Submit,
)
from paceline.engine.page_pool import PageState
from paceline.engine.pools import allocate_pools, pool_memory
from paceline.models.fields import Fields
from paceline.models.mock import MockModel
from paceline.models.registry import ModelSource

torch.set_num_threads(1)
ROOT = bytes(32)
EOS = 7
EDITED: dict[str, Any] = {  # every option of the sampler
    "temperature": 1.2,
    "seed": 5,
    "min_p": 0.001,
    "top_k": 80,
    "top_p": 0.99,
    "typical_p": 0.97,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.6,
    "logit_bias": ((9, 4.0), (40, -5.0)),
    "bad_words": ((11,), (9, 12), (9, 9)),
    "min_tokens": 1,
    "logits_processors": (
        LogitsProcessorCall("allowed_token_ids", f'{{"token_ids": {list(range(2, 90))}}}'),
    ),
}


def mock_model(**config: Any) -> MockModel:
    defaults: dict[str, Any] = {
        "vocab_size": 97,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "max_position_embeddings": 256,
    }
    fields = Fields(defaults | config)
    source = ModelSource(
        folder=Path(),
        fields=fields,
        device=torch.device("cpu"),
        dtype=torch.float32,
        eos_token_ids=(EOS,),
        max_context_length=None,
        progress=lambda done, size: None,
    )
    model, _ = MockModel.load(source)
    return model


def request(
    token_ids: Iterable[int],
    *,
    num_forced: int = 0,
    choices: tuple[int, ...] | None = None,
    priority: int = 0,
    request_id: str = "r",
    pooling: Pooling | None = None,
    itl_ms: float = 0.0,
    **sampling: Any,
) -> RequestSpec:
    tokens = list(token_ids)
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | sampling))
    return RequestSpec(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=len(tokens) - num_forced,
        root_key=ROOT,
        sampling=params,
        choices=tuple(range(params.n)) if choices is None else choices,
        priority=priority,
        pooling=pooling,
        itl_ms=itl_ms,
    )


def prompt(num_tokens: int, salt: int = 0) -> list[int]:
    return [(i * 31 + salt * 17 + 5) % 89 + 8 for i in range(num_tokens)]


@dataclass
class Bench:
    """An engine and all that it said."""

    engine: Engine
    events: list[Event] = field(default_factory=list)

    def handle(self, *commands: Command) -> "Bench":
        for command in commands:
            self.engine.handle(command)
        return self

    def step(self) -> StepOutput | None:
        output = self.engine.step()
        if output is not None:
            self.events += output.events
        return output

    def run(self, max_steps: int = 2000) -> "Bench":
        """Until there is nothing to do."""
        for _ in range(max_steps):
            if self.step() is None:
                return self
        raise AssertionError(f"still busy after {max_steps} steps")

    def run_counting(self) -> list[int]:
        """The same; pages that were in use while each step ran."""
        counts = []
        while self.engine.has_work():
            flight = self.engine.launch()
            if flight is not None:
                counts.append(self.engine.pool.counts[PageState.MAPPED])
                self.finish_step(flight)
            output = self.engine.take_output()
            self.events += output.events if output is not None else []
        return counts

    def finish_step(self, flight: LaunchedStep) -> None:
        self.engine.sample(flight)
        self.engine.retire(flight)

    def of(self, kind: type[Any], slot: int | None = None) -> list[Any]:
        found = [e for e in self.events if isinstance(e, kind)]
        return [e for e in found if slot is None or e.slot == slot]

    def tokens(self, slot: int, choice: int = 0) -> list[int]:
        """A stream, after checking that its positions have neither gap nor overlap."""
        emissions = [e for e in self.of(Emission, slot) if e.choice == choice]
        start = emissions[0].position if emissions else 0
        assert [e.position for e in emissions] == list(range(start, start + len(emissions)))
        return [token for e in emissions for token in e.token_ids]

    def scores(self, slot: int) -> list[PositionLogprobs]:
        """Of the prompt's tokens from the second on, after checking that no part is missing, comes
        twice or after a token."""
        parts = self.of(PromptScored, slot)
        found = [score for part in parts for score in part.scores]
        starts = [1 + sum(len(part.scores) for part in parts[:i]) for i in range(len(parts))]
        assert [part.first_position for part in parts] == starts
        kinds = [type(e) for e in self.events if getattr(e, "slot", None) == slot]
        if parts and Emission in kinds:
            assert kinds.index(Emission) > len(kinds) - 1 - kinds[::-1].index(PromptScored)
        return found

    def vector(self, slot: int) -> NDArray[np.float32]:
        """Of an embedding, after checking that there is nothing else."""
        (found,) = self.of(Embedding, slot)
        assert not self.of(Emission, slot) and len(self.of(Ended, slot)) == 1
        return np.frombuffer(found.vector, "<f4")

    def finish(self, slot: int, choice: int = 0) -> Any:
        return [e for e in self.of(Emission, slot) if e.choice == choice][-1].finish

    def failure(self, slot: int) -> Failed:
        failed: list[Failed] = self.of(Failed, slot)
        assert len(failed) == 1, failed
        return failed[0]

    def assert_idle(self) -> None:
        """Everything is free or cached, and every slot that ended ended once."""
        reply = self.engine.pool_calls.answer(CheckIntegrity())
        assert isinstance(reply, Integrity)
        assert reply.problem == self.engine.pool.check_integrity() == ""
        assert self.engine.cache.check_integrity() == ""
        assert (reply.num_mapped, reply.num_pinned, reply.num_quarantined) == (0, 0, 0)
        assert self.engine.pool.num_promised == 0
        assert not self.engine.groups.live
        ended = [e.slot for e in self.of(Ended)]
        assert len(ended) == len(set(ended))


def bench(model: Any = None, num_pages: int = 64, **config: Any) -> Bench:
    model = mock_model() if model is None else model
    defaults: dict[str, Any] = {"max_batch_tokens": 64, "max_running": 8}
    settings = EngineConfig(**(defaults | config))
    pools = allocate_pools(model.layout, num_pages, "cpu")
    return Bench(Engine(model, settings, pools, pool_memory(pools[0])))


def alone(spec: RequestSpec, model: Any = None) -> dict[int, list[int]]:
    """Tokens of each choice in a quiet run with a large pool."""
    model = mock_model() if model is None else model
    num_pages = 256 * len(model.layout.groups)
    quiet = bench(model, num_pages, max_batch_tokens=1024, max_running=200)
    quiet.handle(Submit(1, spec)).run().assert_idle()
    return {choice: quiet.tokens(1, choice) for choice in spec.choices}
