"""Verified pulls of 4.3 GB between pools of two processes on one CUDA device.

Pages are those of Llama-8B in bfloat16, 2 MiB each, scattered at both ends. `alone`: nothing else
runs. `beside`: while an engine of that shape, random weights, decodes 64 sequences at 1024 in the
reading process; its ITL with pulls and without is taken in turns, after a few in which the pace of
the copies finds its share. Without a device it exits 2.
"""

import contextlib
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from benchmarks.common import Figures, Options, publish, seconds, show
from benchmarks.engine_gpu import make_model, submit
from benchmarks.source_process import source_process
from benchmarks.verified_pull import verified_pull
from paceline.core.kv_layout import PageGroup
from paceline.engine.compute_stream import use_compute_stream
from paceline.engine.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.pools import view_bytes
from paceline.kernels.checksum import sum_pages_on_device
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import CellSums, DevicePool, Link, TransportSettings
from paceline.kv_transfer.copy_pace import CopyPace
from paceline.kv_transfer.cuda_memory import new_device_memory

GROUP = PageGroup("full", num_layers=32, num_heads=8, head_dim=128, dtype="bfloat16")
NUM_PAGES = 2048
SETTINGS = TransportSettings(incarnation="benchmark")
NUM_SEQUENCES, CONTEXT = 64, 1024
WARM_UP, PULLS = 100, 100  # the device's clocks take a while to rise
STEPS, ROUNDS, LEAD_ROUNDS = 40, 6, 2  # of each kind, with pulls and without
DRAWN_BYTES = 256 << 20  # at once
SWITCH_INTERVAL_S = 0.0002  # as in a rank


@dataclass(frozen=True, slots=True)
class Peer:
    address: bytes
    sums: CellSums


def make_pool(num_pages: int, device: str) -> DevicePool:
    memory = new_device_memory(num_pages * GROUP.page_bytes, torch.device(device))
    return DevicePool(memory.bytes, GROUP, num_pages, memory.fd)


def serve(channel: Connection, num_pages: int, device: str) -> None:
    """The source process: exports a pool of random bytes until the channel closes."""
    torch.cuda.set_device(device)
    pool = make_pool(num_pages, device)
    for start in range(0, len(pool.memory), DRAWN_BYTES):
        pool.memory[start : start + DRAWN_BYTES].random_(0, 256)
    source = registry.make_source("cuda_ipc", pool, SETTINGS)
    source.start()
    every = torch.arange(num_pages, device=device)
    values = view_bytes(pool.memory[: num_pages * GROUP.page_bytes], GROUP)
    sums = sum_pages_on_device(values, every, GROUP)
    channel.send(Peer(source.address(), sums.cpu().numpy().view(np.uint64)))
    with contextlib.suppress(EOFError):
        channel.recv()


class Puller:
    """Pulls all of the source's pages into the last pages of a pool."""

    def __init__(self, link: Link, peer: Peer, num_pages: int) -> None:
        num_pulled = len(peer.sums)
        source_pages = np.random.default_rng(1).permutation(num_pulled)
        to = np.random.default_rng(2).permutation(num_pulled) + num_pages - num_pulled
        self._pull = verified_pull(link, GROUP, peer.sums, source_pages, to)
        self._num_bytes = num_pulled * GROUP.page_bytes

    def pull(self) -> float:
        """GB/s. Raises KvMismatch for a page that is not what the source has."""
        return self._num_bytes / seconds(self._pull) / 1e9


def decode_alone_and_beside(
    engine: Engine, puller: Puller, pace: CopyPace, rounds: int
) -> dict[str, float]:
    itl: dict[str, list[float]] = {"alone": [], "beside": []}
    rates: list[float] = []
    stop = threading.Event()

    def pull_until_stopped() -> None:
        while not stop.is_set():
            rates.append(puller.pull())

    order = ("alone", "beside", "beside", "alone")  # contexts grow: neither is always the longer
    for turn in range(2 * (LEAD_ROUNDS + rounds)):
        kind = order[turn % len(order)]
        if turn == 2 * LEAD_ROUNDS:
            itl, rates = {"alone": [], "beside": []}, []
        stop.clear()
        thread = threading.Thread(target=pull_until_stopped)
        if kind == "beside":
            thread.start()
        for _ in range(STEPS):
            started = time.perf_counter()
            engine.step()
            itl[kind].append(1000 * (time.perf_counter() - started))
        stop.set()
        if kind == "beside":
            thread.join()
        show(f"{kind}: {statistics.median(itl[kind][-STEPS:]):.2f} ms a step")
    alone, beside = (statistics.median(itl[kind]) for kind in ("alone", "beside"))
    means = [statistics.mean(itl[kind]) for kind in ("alone", "beside")]
    return {
        "beside_gb_s": statistics.median(rates),
        "itl_alone_ms": alone,
        "itl_beside_ms": beside,
        "itl_beside_of_alone": beside / alone,
        "mean_itl_beside_of_alone": means[1] / means[0],
        "share": pace.share,
    }


def decoding_engine(pool: DevicePool, num_pages: int, num_tokens: int) -> Engine:
    """Over the first `num_pages` of the pool, past its prefills and its first graphs."""
    config = EngineConfig(
        max_batch_tokens=8192,
        max_running=NUM_SEQUENCES,
        step_time_ms=10000,
        output_window_tokens=0,
        prefix_cache=False,
    )
    values = pool.memory[: num_pages * GROUP.page_bytes]
    engine = Engine(make_model(), config, (view_bytes(values, GROUP),))
    submit(engine, NUM_SEQUENCES, CONTEXT, num_tokens)
    while engine.scheduler.waiting or any(s.num_remaining > 1 for s in engine.state.sequences):
        engine.step()
    for _ in range(10):
        engine.step()
    return engine


def measure(options: Options) -> Figures:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    use_compute_stream(torch.device("cuda"))
    rounds = 2 if options.quick else ROUNDS
    num_tokens = 2 * (LEAD_ROUNDS + rounds) * STEPS + 60
    own_pages = NUM_SEQUENCES * (-(-(CONTEXT + num_tokens) // 16) + 1) + 8
    is_busy = threading.Event()
    pace = CopyPace(is_busy.is_set)
    memory = new_device_memory((own_pages + NUM_PAGES) * GROUP.page_bytes, torch.device("cuda"))
    num_pages = own_pages + NUM_PAGES
    pool = DevicePool(memory.bytes, GROUP, num_pages, memory.fd, pace)
    with source_process(serve, NUM_PAGES, "cuda:0") as peer:
        reader = registry.make_reader("cuda_ipc", pool, SETTINGS)
        started = time.perf_counter()
        link = reader.connect(peer.address, timeout_s=5)
        connect_ms = 1000 * (time.perf_counter() - started)
        puller = Puller(link, peer, num_pages)
        rates = [puller.pull() for _ in range(WARM_UP + PULLS)]
        show(f"alone: {rates[0]:.0f} GB/s at first, {max(rates):.0f} at best")
        figures = {"alone_gb_s": statistics.median(rates[WARM_UP:]), "connect_ms": connect_ms}
        engine = decoding_engine(pool, own_pages, num_tokens)
        engine.on_decodes = pace.step_ended
        is_busy.set()
        figures |= decode_alone_and_beside(engine, puller, pace, rounds)
        link.close()
    return figures


if __name__ == "__main__":
    if not torch.cuda.is_available():
        show("cuda_ipc needs a CUDA device; this machine has none")
        sys.exit(2)
    sys.exit(publish("cuda_ipc", measure))
