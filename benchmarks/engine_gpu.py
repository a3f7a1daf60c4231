"""Decode and prefill of a Llama-8B shape on one CUDA device, in process, in bfloat16.

Random weights and prompts: only the work counts. ITL is the median time of an engine step with all
sequences in it, scheduling and sampling included. The floor is what the step must read at 4.6 TB/s,
the read rate of an H200.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Figures, Options, publish, show
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.core.sampling import SamplingParams
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import Emission, RequestSpec, Submit
from paceline.engine.pools import allocate_pools
from paceline.kernels import backend
from paceline.models.fields import Fields
from paceline.models.layers import LayerBuilder
from paceline.models.llama import Llama
from paceline.models.registry import ModelSource

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
READ_BYTES_S = 4.6e12
DECODES = ((1, 1024), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024), (64, 8192))
QUICK = DECODES[:4]
PREFILLS = ((8, 1024), (1, 8192))
NUM_STEPS = 40
MAX_BATCH_TOKENS = 8192


class RandomWeights:
    """Takes the place of a WeightReader: small random numbers, ones for norms."""

    def __contains__(self, name: str) -> bool:
        return True

    def copy_into(self, name: str, place: torch.Tensor, transposed: bool = False) -> None:
        place.fill_(1) if place.dim() == 1 else place.normal_(std=0.02)

    def check_copy(self, name: str, original: str) -> None: ...


def make_model() -> Llama:
    model: Llama = random_model(Llama, LLAMA_8B)
    return model


def random_model(family: Any, shape: dict[str, Any], max_length: int | None = None) -> Any:
    """A model of `family` with random weights."""
    device = torch.device("cuda")
    backend.select("auto", device)
    fields = Fields(shape)
    source = ModelSource(
        Path(), fields, device, torch.bfloat16, (), max_length, lambda done, size: None
    )
    build = LayerBuilder(RandomWeights(), source)  # type: ignore[arg-type]
    return family(family.read_config(source), source, build)


def make_engine(model: Llama, num_sequences: int, num_tokens: int) -> Engine:
    pages = num_sequences * (-(-num_tokens // PAGE_TOKENS) + 1) + 8
    config = EngineConfig(
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_running=num_sequences,
        step_time_ms=10000,
        output_window_tokens=0,
        prefix_cache=False,
    )
    return Engine(model, config, allocate_pools(model.layout, pages, "cuda"))


def submit(engine: Engine, num_sequences: int, prompt: int, output: int) -> None:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    for slot in range(num_sequences):
        token_ids = torch.randint(0, 128000, (prompt,)).tolist()
        spec = RequestSpec(str(slot), token_ids, prompt, bytes(32), params, (0,))
        engine.handle(Submit(slot, spec))


def itl_ms(model: Llama, num_sequences: int, context: int) -> float:
    # The first ones decode while the last are still prefilled.
    num_tokens = NUM_STEPS + num_sequences * context // MAX_BATCH_TOKENS
    engine = make_engine(model, num_sequences, context + num_tokens)
    submit(engine, num_sequences, context, num_tokens)
    times = []
    while engine.has_work():
        started = time.perf_counter()
        output = engine.step()
        emissions = [e for e in output.events if isinstance(e, Emission)] if output else []
        if len(emissions) == num_sequences and not engine.scheduler.waiting:
            times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times[5:])


def floor_ms(model: Llama, num_sequences: int, context: int) -> float:
    read = model.weight_bytes() - model.embedding.table.nbytes  # type: ignore[union-attr]
    group = model.layout.groups[0]
    kv = num_sequences * context * group.page_bytes // PAGE_TOKENS
    return 1000 * (read + kv) / READ_BYTES_S


def prefill_tok_s(model: Llama, num_sequences: int, prompt: int) -> float:
    """Median of some runs, from submission to the first tokens."""
    engine = make_engine(model, num_sequences, prompt)
    times = []
    for _ in range(4):
        submit(engine, num_sequences, prompt, 1)
        started = time.perf_counter()
        while engine.has_work():
            engine.step()
        times.append(time.perf_counter() - started)
    return num_sequences * prompt / statistics.median(times[1:])


def measure(options: Options) -> Figures:
    model = make_model()
    figures = {}
    for num, context in QUICK if options.quick else DECODES:
        show(f"decode {num} at {context}")
        figures[f"itl_{num}_at_{context}_ms"] = itl_ms(model, num, context)
        figures[f"itl_{num}_at_{context}_floor_ms"] = floor_ms(model, num, context)
        torch.cuda.empty_cache()
    for num, prompt in PREFILLS:
        show(f"prefill {num} x {prompt}")
        figures[f"prefill_{num}_x_{prompt}_tok_s"] = prefill_tok_s(model, num, prompt)
    return figures


if __name__ == "__main__":
    if not torch.cuda.is_available():
        show("engine_gpu needs a CUDA device; this machine has none")
        sys.exit(2)
    sys.exit(publish("engine_gpu", measure))
