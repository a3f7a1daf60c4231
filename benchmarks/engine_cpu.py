"""The engine on the CPU against what the machine allows, and what a worker costs when idle.

SmolLM2-135M in float32, two threads, in process, with a worker's default bounds. Decode alone at
batch 1, 8 and 32 after prompts of 128 tokens, prefill of 1024 tokens; `…_of_floor` is the share of
the rate that `benchmarks.floors` allows; `…_int8` and `…_int4` are rates with weights rounded on
load. `idle_overhead_mib` is what a worker's two processes hold beside one float32 copy of the
weights and the pool (`benchmarks.footprint` says how it is counted); `ready_s` the time from
starting a decode worker until /readyz says yes, median of 3. With --peer, `…_vs_vllm`: our rate in
float32 over that of vLLM on the CPU with both cores, `…_vs_llamacpp`: our 4-bit rate over that of
llama.cpp's Q4_1 with two threads (benchmarks/peers). `isa_level` is that of our code: 0 portable,
1 AVX2, 2 AVX-512; benchmarks/peers/README.md says how to hold all sides to AVX2.
"""

import os
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import torch

from benchmarks.common import Options, publish, run_in, show
from benchmarks.deployment import demo_model, deployment
from benchmarks.floors import LlamaWork, Machine
from benchmarks.footprint import resident_bytes
from benchmarks.peer import peer_figures
from paceline.core.sampling import SamplingParams
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import Cancel, Emission, Ended, Event, RequestSpec, Submit
from paceline.engine.pools import allocate_pools, pool_memory
from paceline.kernels import native
from paceline.models.loader import load_model
from paceline.worker.config import StepSettings
from paceline.worker.rank_program import rank_environment

NUM_THREADS = 2
BATCHES = (1, 8, 32)
PROMPT_TOKENS = 128
PREFILL_TOKENS = 1024
POOL_MIB = 1024
NUM_STARTS = 3
QUANTIZATIONS = ("int8", "int4")


class Bench:
    """One engine; every prompt is new, so that nothing is found in the prefix cache."""

    def __init__(self, model: Path, quantization: str = "auto") -> None:
        loaded = load_model(model, "cpu", "float32", quantization=quantization).model
        defaults = StepSettings()  # of a worker
        config = EngineConfig(
            max_batch_tokens=defaults.max_batch_tokens,
            max_running=defaults.max_running,
            step_time_ms=defaults.step_time_ms,
        )
        num_pages = (POOL_MIB << 20) // loaded.layout.page.page_bytes
        pools = allocate_pools(loaded.layout, num_pages, "cpu")
        self.engine = Engine(loaded, config, pools, pool_memory(pools[0]))
        self._vocab_size = loaded.vocab_size
        self._chance = random.Random(3)
        self._num_slots = 0

    def submit(self, num_tokens: int, max_tokens: int) -> int:
        self._num_slots += 1
        tokens = [self._chance.randrange(300, self._vocab_size) for _ in range(num_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        name = f"request-{self._num_slots}"
        spec = RequestSpec(name, tokens, num_tokens, bytes(32), sampling, (0,))
        self.engine.handle(Submit(self._num_slots, spec))
        return self._num_slots

    def events(self) -> Iterable[Event]:
        """Of one step. There must be something to do."""
        output = self.engine.step()
        assert output is not None
        return output.events

    def until_ended(self, num_slots: int) -> None:
        """Steps until so many slots have ended."""
        while num_slots > 0:
            num_slots -= sum(isinstance(event, Ended) for event in self.events())

    def decode_step_s(self, batch: int, num_steps: int) -> float:
        """Median time of a step in which `batch` sequences decode and nothing else happens."""
        slots = [self.submit(PROMPT_TOKENS, num_steps + 8 * batch) for _ in range(batch)]
        started = 0
        while started < batch:
            firsts = (e for e in self.events() if isinstance(e, Emission) and e.position == 0)
            started += sum(1 for _ in firsts)
        times: list[float] = []
        while len(times) < num_steps:
            began = time.perf_counter()
            num_tokens = sum(len(e.token_ids) for e in self.events() if isinstance(e, Emission))
            if num_tokens == batch:
                times.append(time.perf_counter() - began)
        for slot in slots:
            self.engine.handle(Cancel(slot))
        self.until_ended(batch)
        return median(times)

    def prefill_s(self, num_tokens: int) -> float:
        self.submit(num_tokens, 1)
        began = time.perf_counter()
        self.until_ended(1)
        return time.perf_counter() - began


def engine_figures(model: Path, *, quick: bool) -> dict[str, float]:
    torch.set_num_threads(NUM_THREADS)
    machine = Machine.measure()
    work = LlamaWork.of(model)
    bench = Bench(model)
    num_steps = 16 if quick else 48
    figures: dict[str, float] = {
        "read_gb_s": machine.read_bytes_s / 1e9,
        "matrix_gflop_s": machine.flop_s / 1e9,
        "isa_level": native.module.BEST_LEVEL if native.module else 0,
    }
    for batch in BATCHES:
        step_s = bench.decode_step_s(batch, num_steps)
        floor_s = work.decode_floor_s(machine, batch, PROMPT_TOKENS + num_steps / 2)
        figures[f"decode_{batch}_tok_s"] = batch / step_s
        figures[f"decode_{batch}_of_floor"] = floor_s / step_s
        show(f"decode, batch {batch}: {batch / step_s:.1f} tok/s, {floor_s / step_s:.2f} of floor")
    prefill_s = median(bench.prefill_s(PREFILL_TOKENS) for _ in range(1 if quick else 3))
    figures["prefill_tok_s"] = PREFILL_TOKENS / prefill_s
    figures["prefill_of_floor"] = work.prefill_floor_s(machine, PREFILL_TOKENS) / prefill_s
    return figures


def quantized_figures(model: Path, quantization: str, *, quick: bool) -> dict[str, float]:
    bench = Bench(model, quantization)
    figures: dict[str, float] = {}
    for batch in BATCHES:
        step_s = bench.decode_step_s(batch, 16 if quick else 48)
        figures[f"decode_{batch}_tok_s_{quantization}"] = batch / step_s
        show(f"{quantization}, decode, batch {batch}: {batch / step_s:.1f} tok/s")
    prefill_s = median(bench.prefill_s(PREFILL_TOKENS) for _ in range(1 if quick else 3))
    figures[f"prefill_tok_s_{quantization}"] = PREFILL_TOKENS / prefill_s
    return figures


def worker_figures(model: Path) -> dict[str, float]:
    """Starts decode workers one after the other beside a deployment that is ready."""
    ready_s: list[float] = []
    overheads: list[float] = []
    weight_bytes = LlamaWork.of(model).weight_bytes
    with deployment(model, prefill=0, decode=1, restart=False) as cluster:
        for _ in range(NUM_STARTS):
            began = time.perf_counter()
            name = cluster.add_worker("decode")
            ready_s.append(time.perf_counter() - began)
            time.sleep(2)  # whatever it still has to do at its start
            pid = cluster.processes[name].pid
            assert pid is not None
            overheads.append((resident_bytes(pid) - weight_bytes) / 2**20)
            show(f"{name}: ready in {ready_s[-1]:.1f} s, {overheads[-1]:.0f} MiB overhead")
            cluster.processes[name].end(10)
    return {"idle_overhead_mib": median(overheads), "ready_s": median(ready_s)}


def measure(options: Options) -> dict[str, float]:
    model = demo_model()
    workers = worker_figures(model)
    engine = engine_figures(model, quick=options.quick)
    for quantization in QUANTIZATIONS:
        engine |= quantized_figures(model, quantization, quick=options.quick)
    if options.peer:
        engine |= ratios(engine, "vllm", peer_figures("vllm_cpu", str(model)))
        gguf = os.environ.get("PACELINE_PEER_GGUF", "")
        engine |= ratios(engine, "llamacpp", peer_figures("llamacpp", gguf, "2"), "_int4")
    return {**workers, **engine}


def ratios(
    ours: dict[str, float], peer: str, rates: dict[str, float], suffix: str = ""
) -> dict[str, float]:
    """A peer's rates and ours over them. `suffix`: of those of ours that are compared."""
    found: dict[str, float] = {}
    for key, rate in rates.items():
        found[f"{peer}_{key}"] = rate
        found[key.replace("tok_s", f"vs_{peer}")] = ours[key + suffix] / rate
    return found


def main() -> int:
    run_in(rank_environment(os.environ))  # else threads of torch spin where ours should compute
    return publish("engine_cpu", measure)


if __name__ == "__main__":
    sys.exit(main())
