"""Long prompts that arrive beside streams, on one engine and one CUDA device, in process.

Llama-8B shape in bfloat16, random weights. 64 streams (512 tokens in) decode while a prompt of 8000
tokens arrives every 1/rate s for 8 s; in the 3 s before come two, from which the engine learns.
ITL: from one token of a stream to its next; TTFT: from when a prompt was due to its first token.
With a target for ITL and without, and with chunks of at most 2048 tokens.
"""

import statistics
import sys
import time
from dataclasses import dataclass, field

import torch

from benchmarks.common import Figures, Options, publish, show
from benchmarks.engine_gpu import make_model
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.core.sampling import SamplingParams
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.messages import Emission, RequestSpec, Submit
from paceline.engine.pools import allocate_pools
from paceline.models.llama import Llama

NUM_STREAMS, STREAM_PROMPT, STREAM_TOKENS = 64, 512, 3000
PROMPT, PROMPT_OUTPUT = 8000, 2
WARM_UP_S, LEAD_S, MEASURED_S = 4.0, 3.0, 8.0
MOST_PROMPTS = 8  # in flight
ITL_TARGET_MS = 40.0


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    rate: float
    itl_target_ms: float = 0.0
    max_batch_tokens: int = 8192


CASES = (
    Case("target_40_rate_2", 2, ITL_TARGET_MS),
    Case("target_40_rate_4", 4, ITL_TARGET_MS),
    Case("rate_2", 2),
    Case("rate_2_chunks_2048", 2, max_batch_tokens=2048),
)


@dataclass
class Load:
    """What runs and what was seen of it. Slots below NUM_STREAMS are streams."""

    engine: Engine
    itl_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    _due: dict[int, float] = field(default_factory=dict)
    _last: dict[int, float] = field(default_factory=dict)
    _num_submitted: int = 0

    def submit(self, prompt: int, output: int, due: float) -> None:
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        token_ids = torch.randint(0, 128000, (prompt,)).tolist()
        slot, self._num_submitted = self._num_submitted, self._num_submitted + 1
        spec = RequestSpec(str(slot), token_ids, prompt, bytes(32), params, (0,))
        self._due[slot] = due
        self.engine.handle(Submit(slot, spec))

    def step(self) -> None:
        output = self.engine.step()
        now = time.perf_counter()
        for event in output.events if output is not None else ():
            if not isinstance(event, Emission):
                continue
            if event.position == 0 and event.slot >= NUM_STREAMS:
                self.ttft_s.append(now - self._due[event.slot])
            if event.slot < NUM_STREAMS:
                if event.slot in self._last:
                    self.itl_s.append(now - self._last[event.slot])
                self._last[event.slot] = now

    def run(self, seconds: float, dues: list[float]) -> None:
        """From now on; a prompt arrives whenever one of `dues`, in seconds from now, has come."""
        started = time.perf_counter()
        waiting = list(dues)
        while time.perf_counter() < started + seconds or waiting:
            while waiting and time.perf_counter() >= started + waiting[0]:
                self.submit(PROMPT, PROMPT_OUTPUT, started + waiting.pop(0))
            self.step()

    def forget(self) -> None:
        self.itl_s, self.ttft_s = [], []


def run_case(model: Llama, case: Case, seconds: float) -> Load:
    """What was seen in so many seconds, and until the last prompt's first token."""
    pages = NUM_STREAMS * (STREAM_PROMPT + STREAM_TOKENS) + MOST_PROMPTS * (PROMPT + PAGE_TOKENS)
    config = EngineConfig(
        max_batch_tokens=case.max_batch_tokens,
        max_running=NUM_STREAMS + MOST_PROMPTS,
        step_time_ms=10000,
        itl_target_ms=case.itl_target_ms,
        output_window_tokens=0,
        prefix_cache=False,
    )
    pools = allocate_pools(model.layout, pages // PAGE_TOKENS + 128, "cuda")
    load = Load(Engine(model, config, pools))
    for _ in range(NUM_STREAMS):
        load.submit(STREAM_PROMPT, STREAM_TOKENS, time.perf_counter())
    load.run(LEAD_S, [LEAD_S / 6, LEAD_S / 2])
    load.forget()
    num_prompts = int(seconds * case.rate)
    load.run(seconds, [number / case.rate for number in range(num_prompts)])
    itl_s = load.itl_s
    load.itl_s = []
    while len(load.ttft_s) < num_prompts:
        load.step()
    load.itl_s = itl_s
    return load


def measure_case(model: Llama, case: Case) -> dict[str, float]:
    load = run_case(model, case, MEASURED_S)
    itl_s = load.itl_s
    figures = {
        "itl_p50_ms": statistics.median(itl_s),
        "itl_p99_ms": percentile(itl_s, 99),
        "itl_max_ms": max(itl_s),
        "ttft_p50_ms": statistics.median(load.ttft_s),
        "ttft_p99_ms": percentile(load.ttft_s, 99),
    }
    return {f"{case.name}_{name}": 1000 * value for name, value in figures.items()}


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def measure(options: Options) -> Figures:
    model = make_model()
    run_case(model, CASES[0], WARM_UP_S)  # compiles kernels
    torch.cuda.empty_cache()
    figures: dict[str, float] = {}
    for case in CASES[:1] if options.quick else CASES:
        show(case.name)
        figures |= measure_case(model, case)
        torch.cuda.empty_cache()
    return figures


if __name__ == "__main__":
    if not torch.cuda.is_available():
        show("prefill_beside_decode needs a CUDA device; this machine has none")
        sys.exit(2)
    sys.exit(publish("prefill_beside_decode", measure))
