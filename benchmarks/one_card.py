"""Prefill and decode workers on one card: a burst of prompts, until the last decodes.

A Llama-8B shape with random bfloat16 weights, as processes, KV by cuda_ipc. 64 requests of 512
tokens come at once; tokens are taken from the router, times are the client's. Medians of a few
bursts, after one that does not count.

last_ttft_s       the last first token, which comes from the prefill worker
last_decoding_s   the last second token, the first that the decode worker computes
token2_gap_ms     the longest time between both of one request
itl_p50_ms        between tokens, once all decode

Without a card only the quick form runs: a tiny model on the CPU, which shows that all works.
"""

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from benchmarks.common import Options, publish, show
from benchmarks.interference import Load, run_idle, run_rate
from benchmarks.random_llama import write_random_llama
from benchmarks.token_streams import Stream
from benchmarks.two_cards import CARDS, CPU, Scale, check, split_spec, target_of, token2_gaps
from paceline.cli.cluster import Cluster

NUM_BURSTS, NUM_STREAMS, PROMPT, OUTPUT = 5, 64, 512, 128
LONGEST = 2048  # each length that may occur has graphs of its own


def scale_of(has_card: bool) -> Scale:
    if not has_card:
        return replace(CPU, load=Load(4, 64, 100, 400, 512, rates=(0,), settle_s=0, window_s=0))
    return replace(
        CARDS,
        model=CARDS.model | {"max_position_embeddings": LONGEST},
        cards=("cuda:0", "cuda:0"),
        worker={**CARDS.worker, "max_running": NUM_STREAMS},
        load=Load(NUM_STREAMS, PROMPT, OUTPUT, LONGEST - 8, rates=(0,), settle_s=0, window_s=0),
    )


def figures_of(streams: list[Stream]) -> dict[str, float]:
    """Raises RuntimeError if a request failed."""
    check(streams)
    sent_s = min(stream.sent_s for stream in streams)
    all_decode_s = max(stream.times[1] for stream in streams)
    gaps = [b - a for s in streams for a, b in pairwise(s.times) if a >= all_decode_s]
    return {
        "last_ttft_s": max(stream.times[0] for stream in streams) - sent_s,
        "last_decoding_s": all_decode_s - sent_s,
        "token2_gap_ms": 1000 * max(token2_gaps(streams)),
        "itl_p50_ms": 1000 * median(gaps) if gaps else 0.0,
    }


def measure_on(scale: Scale, client: ProcessPoolExecutor, num_bursts: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        show("writing the model")
        model = write_random_llama(Path(folder) / "llama", scale.model, scale.device, scale.dtype)
        torch.cuda.empty_cache()
        show("starting the deployment")
        found = []
        with Cluster(split_spec(model, scale)) as cluster:
            check(client.submit(run_idle, target_of(cluster), scale.load, 2).result())
            for number in range(num_bursts + 1):
                target = target_of(cluster, f"burst-{number}")  # nothing of the one before is found
                run = client.submit(run_rate, target, scale.load, 0).result()
                found.append(figures_of(run.streams))
                show(", ".join(f"{name} {value:.3f}" for name, value in found[-1].items()))
    return {name: median(figures[name] for figures in found[1:]) for name in found[0]}


def measure(options: Options) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as client:
        num_bursts = 2 if options.quick else NUM_BURSTS
        return measure_on(scale_of(torch.cuda.is_available()), client, num_bursts)


def main() -> int:
    if not torch.cuda.is_available() and "--quick" not in sys.argv:
        show("one_card needs a CUDA device; with --quick a tiny model runs on the CPU")
        return 2
    return publish("one_card", measure)


if __name__ == "__main__":
    sys.exit(main())
