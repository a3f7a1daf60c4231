"""What sampling takes on a CUDA device: 256 rows of 152k random logits, from launch to tokens.

`greedy`, `random` (with a temperature), `nucleus` (with top-p besides), `filtered` (and top-k).
Medians of device time between two events around a call, while launches are queued behind others so
that the host does not show.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.common import Figures, Options, publish, seconds, show
from benchmarks.device_time import device_seconds
from paceline.engine.sampler import SampleBatch, sample
from paceline.kernels import backend

NUM_ROWS, VOCABULARY = 256, 151936
REPEATS = 15
BUSY_CYCLES = 4_000_000  # of the device, 2 ms: time for the host to launch what follows
MS = 1e3


def batch_of(temperature: float, top_k: int = 0, top_p: float = 1.0) -> SampleBatch:
    every = np.arange(NUM_ROWS)
    return SampleBatch(
        rows=every,
        temperature=np.full(NUM_ROWS, temperature, np.float32),
        min_p=np.zeros(NUM_ROWS, np.float32),
        top_k=np.full(NUM_ROWS, top_k),
        top_p=np.full(NUM_ROWS, top_p, np.float32),
        typical_p=np.ones(NUM_ROWS, np.float32),
        seed=every,
        choice=np.zeros(NUM_ROWS, np.int64),
        position=every,
        num_logprobs=np.full(NUM_ROWS, -1),
    )


def device_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 3):
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        times.append(device_seconds(call))
    return MS * statistics.median(times[3:])


def measure(options: Options) -> Figures:
    backend.select("auto", torch.device("cuda"))
    logits = 3 * torch.randn(NUM_ROWS, VOCABULARY, device="cuda")
    cases = {
        "greedy": batch_of(0.0),
        "random": batch_of(0.6),
        "nucleus": batch_of(0.6, top_p=0.9),
        "filtered": batch_of(0.6, top_k=50, top_p=0.9),
    }
    figures = {}
    for name, batch in cases.items():
        show(name)
        call = partial(sample, logits, batch)
        figures[f"{name}_ms"] = device_ms(call)
        torch.cuda.synchronize()
        figures[f"{name}_launch_ms"] = MS * statistics.median(seconds(call) for _ in range(5))
    return figures


if __name__ == "__main__":
    if not torch.cuda.is_available():
        show("sampling_gpu needs a CUDA device; this machine has none")
        sys.exit(2)
    sys.exit(publish("sampling_gpu", measure))
