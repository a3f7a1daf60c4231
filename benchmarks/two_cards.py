"""Prefill on one card and decode on the other, beside two whole workers on the same cards.

A Llama-8B shape with random bfloat16 weights. 64 streams decode (512 tokens in, 900 out) while
prompts of 8000 tokens come at 0, 2, 4 and 6 a second; tokens are taken from the router. Two
deployments take turns: `split` (a prefill worker on card 0, a decode worker on card 1, KV by
cuda_ipc over the link) and `whole` (two workers that do both).

itl_p50_ms_R, itl_p99_ms_R, itl_max_ms_R   gaps between tokens of the 64 streams while prompts come
ttft_p50_ms_R, token2_gap_p50_ms_R         of the long prompts, at R a second
burst_last_ttft_s, burst_token2_gap_ms     64 x 512 at once: the last first token; the longest gap
                                           between tokens 1 and 2; medians over the rates
whole_…                                    the same of the whole workers
whole_ttft_idle_ms                         a long prompt, nothing else running
link_of_p2p                                benchmarks/card_link.py
failed, differing                          requests and tokens, when the prefill worker is killed
                                           with signal 9 in the middle of pulls

Without two cards only the quick form runs: a tiny model on the CPU, which shows that all works.
"""

import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import Options, publish, show
from benchmarks.deployment import mock_model, workers_total
from benchmarks.engine_gpu import LLAMA_8B
from benchmarks.interference import Load, Run, failures, run_idle, run_kill, run_rate
from benchmarks.random_llama import write_random_llama
from benchmarks.token_streams import Stream, Target
from paceline.cli.cluster import Cluster, ClusterSpec
from paceline.core import metrics as names

READY_S = 400.0
LLAMA_TINY = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Settings = dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Scale:
    """What is run, and on what. `kill` is of the mock model, whose tokens show every wrong byte;
    `kill_llama` of the other."""

    model: dict[str, Any]
    mock: dict[str, Any]
    device: str
    dtype: torch.dtype
    cards: tuple[str, str]
    worker: dict[str, object]
    load: Load
    kill: Load
    kill_llama: Load


CARDS = Scale(
    # As many positions as are used: each length that may occur has graphs of its own.
    LLAMA_8B | {"max_position_embeddings": 9216},
    {"num_hidden_layers": 8, "num_key_value_heads": 8, "head_dim": 128},
    "cuda:0",
    torch.bfloat16,
    ("cuda:0", "cuda:1"),
    {"max_batch_tokens": 8192, "max_running": 128, "pool_mib": 24 << 10, "num_threads": 4},
    Load(rates=(0, 2, 4, 6)),
    Load(num_streams=48, prompt=2000, output=60, vocab_size=4096),
    Load(num_streams=16, prompt=8000, output=32),
)
CPU = Scale(
    LLAMA_TINY | {"max_position_embeddings": 2048},
    {"step_s": 0.01, "token_s": 0.00002},
    "cpu",
    torch.float32,
    ("cpu", "cpu"),
    {"pool_mib": 64, "num_threads": 1, "max_running": 16},
    Load(4, 64, 1500, 400, 512, rates=(0, 4), settle_s=0.5, window_s=1.5),
    Load(num_streams=12, prompt=300, output=60, vocab_size=4096),
    Load(num_streams=6, prompt=300, output=20, vocab_size=512),
)


@dataclass(frozen=True, slots=True)
class Deployments:
    split: Cluster
    whole: Cluster
    mock: Cluster  # split


def split_spec(model: Path, scale: Scale, **overrides: object) -> ClusterSpec:
    """The prefill worker computes nothing beside a prompt: its steps may take one in whole."""
    prefill, decode = ({**scale.worker, "device": card, **overrides} for card in scale.cards)
    settings: Settings = {"prefill": {**prefill, "step_time_ms": 150}, "decode": decode}
    return ClusterSpec(model, 1, 1, settings=settings, restart=False, ready_timeout_s=READY_S)


def whole_spec(model: Path, scale: Scale) -> ClusterSpec:
    settings: Settings = {"decode": scale.worker}
    settings |= {f"decode-{i}": {"device": card} for i, card in enumerate(scale.cards)}
    return ClusterSpec(model, 0, 2, settings=settings, restart=False, ready_timeout_s=READY_S)


@contextmanager
def deployments(llama: Path, mock: Path, scale: Scale) -> Iterator[Deployments]:
    """All at once: a worker takes a while to compile and capture. Those in no use only beat."""
    pool_mib = min(4096, int(str(scale.worker["pool_mib"])))
    specs = [
        split_spec(llama, scale),
        whole_spec(llama, scale),
        split_spec(mock, scale, pool_mib=pool_mib, max_batch_tokens=4096),
    ]
    clusters = [Cluster(spec) for spec in specs]
    with ExitStack() as stack, ThreadPoolExecutor(len(clusters)) as starters:
        starts = [starters.submit(cluster.start) for cluster in clusters]
        for cluster, started in zip(clusters, starts, strict=True):
            started.result()
            stack.callback(cluster.stop)
        yield Deployments(*clusters)


def target_of(cluster: Cluster, tenant: str = "benchmark") -> Target:
    return Target(cluster.router_endpoint, cluster.secret, cluster.spec.model, tenant)


def percentile(seconds: list[float], share: float) -> float:
    """In ms."""
    return 1000 * sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * share))]


def itl_figures(run: Run) -> dict[str, float]:
    window = (run.start_s, run.end_s)
    gaps = [gap for stream in run.streams for gap in stream.gaps(*window)]
    emitted = [gap for stream in run.streams for gap in stream.emitted_gaps(*window)]
    return {
        f"itl_p50_ms_{run.rate}": percentile(gaps, 0.5),
        f"itl_p99_ms_{run.rate}": percentile(gaps, 0.99),
        f"itl_max_ms_{run.rate}": percentile(gaps, 1),
        f"itl_engine_p99_ms_{run.rate}": percentile(emitted, 0.99),
        f"itl_engine_max_ms_{run.rate}": percentile(emitted, 1),
    }


def long_figures(run: Run) -> dict[str, float]:
    if not run.longs:
        return {}
    gaps = token2_gaps(run.longs)
    return {
        f"ttft_p50_ms_{run.rate}": percentile([stream.ttft_s for stream in run.longs], 0.5),
        f"ttft_p99_ms_{run.rate}": percentile([stream.ttft_s for stream in run.longs], 0.99),
        f"token2_gap_p50_ms_{run.rate}": percentile(gaps, 0.5),
        f"token2_gap_p99_ms_{run.rate}": percentile(gaps, 0.99),
        f"pull_p50_ms_{run.rate}": median(stream.pull_us for stream in run.longs) / 1000,
    }


def token2_gaps(streams: list[Stream]) -> list[float]:
    return [stream.times[1] - stream.times[0] for stream in streams]


def load_figures(runs: list[Run]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for run in runs:
        figures |= itl_figures(run) | long_figures(run)
    bursts = [run.streams for run in runs]
    figures["burst_last_ttft_s"] = median(max(s.ttft_s for s in burst) for burst in bursts)
    figures["burst_token2_gap_ms"] = 1000 * median(max(token2_gaps(burst)) for burst in bursts)
    return figures


def check(streams: list[Stream]) -> None:
    """Raises RuntimeError if a request failed: there would be nothing to measure."""
    if found := failures(streams):
        raise RuntimeError(f"{len(found)} requests failed: {found[0]}")


def measure_load(client: ProcessPoolExecutor, cluster: Cluster, load: Load) -> dict[str, float]:
    target, runs = target_of(cluster), []
    check(client.submit(run_idle, target, load, 2).result())  # connects and warms up
    for rate in load.rates:
        run = client.submit(run_rate, target, load, rate).result()
        check([*run.streams, *run.longs])
        figures = itl_figures(run) | long_figures(run)
        show(", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
        runs.append(run)
    return load_figures(runs)


def measure_kill(
    client: ProcessPoolExecutor, running: Deployments, scale: Scale
) -> dict[str, float]:
    """Of the mock model, whose tokens are compared with an undisturbed run's, and of the other."""

    def run(tenant: str, pid: int | None) -> list[Stream]:
        return client.submit(run_kill, target_of(running.mock, tenant), scale.kill, pid).result()

    expected = run("undisturbed", None)
    whole = workers_total(running.mock, names.TRANSFER_BYTES, "decode")
    found = run("killed", running.mock.processes["prefill-0"].pid)
    pulled = workers_total(running.mock, names.TRANSFER_BYTES, "decode") - whole
    show(f"pulled {pulled / 2**20:.0f} MiB, {whole / 2**20:.0f} when nothing died")
    pid = running.split.processes["prefill-0"].pid
    llama = client.submit(run_kill, target_of(running.split), scale.kill_llama, pid).result()
    failed = failures([*expected, *found, *llama])
    for reason in failed:
        show(f"failed: {reason}")
    pairs = zip(found, expected, strict=True)
    return {
        "failed": len(failed),
        "differing": sum(a.token_ids != b.token_ids for a, b in pairs),
        "killed_pulled_share": pulled / whole if whole else 0.0,
    }


def measure_on(scale: Scale, client: ProcessPoolExecutor) -> dict[str, float]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        show("writing the model")
        llama = write_random_llama(folder / "llama", scale.model, scale.device, scale.dtype)
        torch.cuda.empty_cache()
        mock = stack.enter_context(mock_model(scale.kill.vocab_size, **scale.mock))
        show("starting the deployments")
        running = stack.enter_context(deployments(llama, mock, scale))
        figures: dict[str, float] = {}
        for prefix, cluster in (("", running.split), ("whole_", running.whole)):
            show(f"load on {prefix or 'split_'}workers")
            found = measure_load(client, cluster, scale.load)
            figures |= {prefix + name: value for name, value in found.items()}
        idle = client.submit(run_idle, target_of(running.whole), scale.load, 5).result()
        check(idle)
        figures["whole_ttft_idle_ms"] = percentile([stream.ttft_s for stream in idle], 0.5)
        show("kill -9 of the prefill workers")
        return figures | measure_kill(client, running, scale)


def measure(options: Options) -> dict[str, float]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as client:
        if torch.cuda.device_count() < 2:
            return measure_on(CPU, client)
        from benchmarks.card_link import link_figures  # needs Triton

        figures = link_figures()
        return figures | measure_on(CARDS, client)


def main() -> int:
    if torch.cuda.device_count() < 2 and "--quick" not in sys.argv:
        show("two_cards needs two CUDA devices; with --quick a tiny model runs on the CPU")
        return 2
    return publish("two_cards", measure)


if __name__ == "__main__":
    sys.exit(main())
