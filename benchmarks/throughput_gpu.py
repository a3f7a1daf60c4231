"""Output tokens a second of many requests of mixed lengths on one CUDA device, in process.

Qwen3-0.6B shape in bfloat16, random weights; 256 requests of 100 to 1024 tokens in and as many out
at temperature 0.6, all there at the start. The second of two equal runs counts, as for vLLM.
"""

import gc
import random
import sys
import time
from typing import Any

import torch

from benchmarks.common import Figures, Options, publish, show
from benchmarks.engine_gpu import random_model
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.core.sampling import SamplingParams
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import RequestSpec, Submit
from paceline.engine.pools import allocate_pools
from paceline.models.qwen3 import Qwen3

QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
NUM_REQUESTS, SHORTEST, LONGEST, MAX_LENGTH = 256, 100, 1024, 4096
TEMPERATURE = 0.6
Lengths = list[tuple[int, int]]  # tokens in and out


def make_engine(num_requests: int) -> Engine:
    model = random_model(Qwen3, QWEN3_06B, MAX_LENGTH)
    config = EngineConfig(
        max_batch_tokens=8192,
        max_running=num_requests,
        step_time_ms=10000,
        output_window_tokens=LONGEST,
        prefix_cache=False,
    )
    num_pages = num_requests * (2 * LONGEST // PAGE_TOKENS + 1) + 8
    return Engine(model, config, allocate_pools(model.layout, num_pages, "cuda"))


def run(engine: Engine, lengths: Lengths, seed: int) -> float:
    """Output tokens a second."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(10000) for _ in range(prompt)] for prompt, _ in lengths]
    started = time.perf_counter()
    for slot, (token_ids, (_, output)) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(max_tokens=output, temperature=TEMPERATURE, ignore_eos=True)
        spec = RequestSpec(str(slot), token_ids, len(token_ids), bytes(32), params, (0,))
        engine.handle(Submit(slot, spec))
    while engine.has_work():
        engine.step()
    return sum(output for _, output in lengths) / (time.perf_counter() - started)


def measure(options: Options) -> Figures:
    chance = random.Random(0)
    num_requests = 32 if options.quick else NUM_REQUESTS
    lengths = [
        (chance.randint(SHORTEST, LONGEST), chance.randint(SHORTEST, LONGEST))
        for _ in range(num_requests)
    ]
    engine = make_engine(num_requests)
    started = time.perf_counter()
    engine.warm_up()
    gc.freeze()  # as a rank does: else a step waits 100 ms, now and then
    warm_up_s = time.perf_counter() - started
    show(f"warm after {warm_up_s:.1f} s")
    rates = [run(engine, lengths, seed) for seed in (1, 2)]
    show(f"{rates[0]:.0f} tok/s at first")
    return {"output_tok_s": rates[1], "warm_up_s": warm_up_s}


if __name__ == "__main__":
    if not torch.cuda.is_available():
        show("throughput_gpu needs a CUDA device; this machine has none")
        sys.exit(2)
    sys.exit(publish("throughput_gpu", measure))
