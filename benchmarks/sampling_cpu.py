"""What sampling costs beside the forward pass that it follows.

SmolLM2-135M in float32, two threads, in process: 32 sequences decode after prompts of 128 tokens.
Of each step, the time of the model's forward pass (`decode_step_ms`) and of all the rest, which is
sampling and a little scheduling: with every option on (`sampler_ms`: penalties, biases, bad words,
a logits processor, all filters, 20 logprobs), with a temperature alone (`random_ms`) and greedy
(`greedy_ms`). Medians; `ratio` is sampler_ms / decode_step_ms.
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Options, publish, run_in, show
from benchmarks.deployment import demo_model
from paceline.core.sampling import LogitsProcessorCall, SamplingParams
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import Cancel, Emission, RequestSpec, Submit
from paceline.engine.pools import allocate_pools, pool_memory
from paceline.models.base import ForwardBatch, Model
from paceline.models.loader import load_model
from paceline.worker.rank_program import rank_environment

NUM_THREADS = 2
BATCH = 32
PROMPT_TOKENS = 128
POOL_MIB = 1024
MS = 1e3

TEMPERATURE: dict[str, Any] = {"temperature": 0.8, "seed": 1}
EVERYTHING: dict[str, Any] = TEMPERATURE | {
    "min_p": 1e-4,
    "top_k": 2000,
    "top_p": 0.99,
    "typical_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
    "logit_bias": tuple((1000 + 7 * i, -1.0) for i in range(100)),
    "bad_words": tuple((2000 + i, 3000 + i) for i in range(50)),
    "min_tokens": 1000,
    "stop_token_ids": (5, 6, 7),
    "num_logprobs": 20,
    "logits_processors": (
        LogitsProcessorCall("allowed_token_ids", f'{{"token_ids":{list(range(300, 1500))}}}'),
    ),
}


class TimedModel:
    """A model that notes how long its forward pass takes."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.forward_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: ForwardBatch, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
        began = time.perf_counter()
        logits = self._model.forward(batch, pools)
        self.forward_s = time.perf_counter() - began
        return logits


class Bench:
    def __init__(self, folder: Path) -> None:
        self._model = TimedModel(load_model(folder, "cpu", "float32").model)
        num_pages = (POOL_MIB << 20) // self._model.layout.groups[0].page_bytes
        pools = allocate_pools(self._model.layout, num_pages, "cpu")
        self._engine = Engine(self._model, EngineConfig(), pools, pool_memory(pools[0]))
        chance = random.Random(5)
        self._prompts = [
            [chance.randrange(300, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(BATCH)
        ]
        self._slots = 0

    def steps(self, num_steps: int, sampling: dict[str, Any]) -> Iterator[tuple[float, float]]:
        """Seconds of the forward pass and of all else, of steps in which all sequences decode."""
        slots = [self._submit(tokens, num_steps, sampling) for tokens in self._prompts]
        num_timed = 0
        while num_timed < num_steps:
            began = time.perf_counter()
            output = self._engine.step()
            step_s = time.perf_counter() - began
            assert output is not None
            if sum(isinstance(event, Emission) for event in output.events) == BATCH:
                num_timed += 1
                yield self._model.forward_s, step_s - self._model.forward_s
        for slot in slots:
            self._engine.handle(Cancel(slot))
        self._engine.take_output()

    def _submit(self, tokens: list[int], num_steps: int, sampling: dict[str, Any]) -> int:
        self._slots += 1
        max_tokens = max(1000, num_steps + 8 * BATCH)
        fixed = {"ignore_eos": True, "max_tokens": max_tokens}
        params = SamplingParams(**({"temperature": 0.0} | sampling | fixed))
        spec = RequestSpec(f"r{self._slots}", tokens, len(tokens), bytes(32), params, (0,))
        self._engine.handle(Submit(self._slots, spec))
        return self._slots


def medians(steps: Iterable[tuple[float, float]]) -> tuple[float, float]:
    forward, rest = zip(*steps, strict=True)
    return MS * statistics.median(forward), MS * statistics.median(rest)


def measure(options: Options) -> dict[str, float]:
    torch.set_num_threads(NUM_THREADS)
    bench = Bench(demo_model())
    num_steps = 12 if options.quick else 60
    figures: dict[str, float] = {}
    for name, sampling in (("greedy", {}), ("random", TEMPERATURE), ("sampler", EVERYTHING)):
        step_ms, rest_ms = medians(bench.steps(num_steps, sampling))
        show(f"{name}: {rest_ms:.2f} ms beside a forward pass of {step_ms:.1f} ms")
        figures |= {f"{name}_ms": rest_ms, "decode_step_ms": step_ms}
    return figures | {"ratio": figures["sampler_ms"] / figures["decode_step_ms"]}


def main() -> int:
    run_in(rank_environment(os.environ))  # else threads of torch spin where ours should compute
    return publish("sampling_cpu", measure)


if __name__ == "__main__":
    sys.exit(main())
