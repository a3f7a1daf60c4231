"""The engine on a CUDA device: same tokens as on the CPU, decode steps replayed as graphs.

Runs in process, float32 on both sides; without a device it says so and exits 2. The times of a
decode step are in bfloat16, batch 8, contexts of about 128 tokens; `serial` without a step that is
launched behind it, `torch` without our kernels.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.common import Figures, Options, publish, show
from paceline.core.sampling import SamplingParams
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import Emission, RequestSpec, Submit
from paceline.engine.pools import allocate_pools, pool_memory
from paceline.models.loader import load_model

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
MODEL = CACHE / "paceline" / "models" / "SmolLM2-135M-Instruct"
NUM_PAGES = 1024
NUM_TOKENS = 64


def make_engine(
    device: str, dtype: str, graphs: bool, kernels: str = "auto", overlap: bool | None = None
) -> Engine:
    model = load_model(MODEL, device, dtype, kernels=kernels).model
    config = EngineConfig(cuda_graphs=graphs, max_running=32, overlap=overlap)
    pools = allocate_pools(model.layout, NUM_PAGES, device)
    return Engine(model, config, pools, pool_memory(pools[0]) if device == "cpu" else None)


def prompts(count: int) -> list[list[int]]:
    texts = (Path(__file__).parent / "prompts.txt").read_text().split("%%\n")
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return [tokenizer.encode(text.strip()).ids for text in texts][:count]


def generate(engine: Engine, requests: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Output tokens of each request, all in one continuous batch."""
    for slot, token_ids in enumerate(requests):
        spec = RequestSpec(str(slot), token_ids, len(token_ids), bytes(32), params, (0,))
        engine.handle(Submit(slot, spec))
    outputs: list[list[int]] = [[] for _ in requests]
    while engine.has_work():
        output = engine.step()
        for event in output.events if output else []:
            if isinstance(event, Emission):
                outputs[event.slot] += event.token_ids
    return outputs


def decode_ms(engine: Engine) -> float:
    """Median time of a pure decode step at batch 8."""
    params = SamplingParams(max_tokens=160, temperature=0.0, ignore_eos=True)
    for slot in range(8):
        token_ids = [(slot * 97 + i * 31) % 40000 for i in range(128)]
        engine.handle(Submit(slot, RequestSpec(str(slot), token_ids, 128, bytes(32), params, (0,))))
    times = []
    while engine.has_work():
        started = time.perf_counter()
        output = engine.step()
        if output and sum(isinstance(event, Emission) for event in output.events) == 8:
            times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times[16:])


def differing(left: list[list[int]], right: list[list[int]]) -> int:
    pairs = zip(left, right, strict=True)
    return sum(a != b for x, y in pairs for a, b in zip(x, y, strict=True))


def measure(options: Options) -> Figures:
    requests = prompts(8 if options.quick else 40)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_p=0.9, seed=7)
    outputs = {}
    for name, device, graphs in (
        ("cpu", "cpu", False),
        ("eager", "cuda", False),
        ("graph", "cuda", True),
    ):
        show(f"{name}: {len(requests)} prompts, {NUM_TOKENS} tokens each")
        engine = make_engine(device, "float32", graphs)
        outputs[name] = generate(engine, requests, params)
        outputs[name + " drawn"] = generate(engine, requests, drawn)
    show("time of a decode step")
    return {
        "num_tokens": sum(map(len, outputs["cpu"])),
        "differing_tokens_eager": differing(outputs["cpu"], outputs["eager"]),
        "differing_tokens_graph": differing(outputs["cpu"], outputs["graph"]),
        "differing_drawn": sum(
            a != b for a, b in zip(outputs["cpu drawn"], outputs["graph drawn"], strict=True)
        ),
        "decode_8_eager_ms": decode_ms(make_engine("cuda", "bfloat16", False)),
        "decode_8_graph_ms": decode_ms(make_engine("cuda", "bfloat16", True)),
        "decode_8_serial_ms": decode_ms(make_engine("cuda", "bfloat16", True, overlap=False)),
        "decode_8_graph_torch_ms": decode_ms(make_engine("cuda", "bfloat16", True, "torch")),
    }


if __name__ == "__main__":
    if not torch.cuda.is_available():
        show("engine_cuda needs a CUDA device; this machine has none")
        sys.exit(2)
    sys.exit(publish("engine_cuda", measure))
