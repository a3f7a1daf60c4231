"""A verified pull between two cards, over a plain copy of as many bytes from one to the other."""

import statistics
import time
from typing import Any

import torch

from benchmarks.common import show
from benchmarks.cuda_ipc import GROUP, SETTINGS, Puller, make_pool, serve
from benchmarks.source_process import source_process
from paceline.engine.compute_stream import use_compute_stream
from paceline.kv_transfer import registry

SOURCE, READER = "cuda:0", "cuda:1"
NUM_PAGES = 512  # 1 GiB in pages of Llama-8B, scattered at both ends
WARM_UP, ROUNDS = 10, 60


def link_figures() -> dict[str, float]:
    """In turns, medians; the pull includes its checks, the copy is one of contiguous memory."""
    use_compute_stream(torch.device(READER))
    num_bytes = NUM_PAGES * GROUP.page_bytes
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=SOURCE)
    to: Any = torch.empty_like(source, device=READER)
    pulls, copies = [], []
    with source_process(serve, NUM_PAGES, SOURCE) as peer:
        pool = make_pool(NUM_PAGES, READER)
        link = registry.make_reader("cuda_ipc", pool, SETTINGS).connect(peer.address, timeout_s=5)
        puller = Puller(link, peer, NUM_PAGES)
        for _ in range(WARM_UP + ROUNDS):
            pulls.append(puller.pull())
            started = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize(READER)
            copies.append(num_bytes / (time.perf_counter() - started) / 1e9)
        link.close()
    pull, copy = (statistics.median(found[WARM_UP:]) for found in (pulls, copies))
    show(f"pull {pull:.0f} GB/s, best {max(pulls):.0f}; copy {copy:.0f}, best {max(copies):.0f}")
    return {"link_of_p2p": pull / copy, "pull_gb_s": pull, "p2p_gb_s": copy}
