"""Kernels on a CUDA device against what the device can do: bytes or operations over time.

Shapes are those of Llama-8B: 32 query heads, 8 KV heads of 128, hidden size 4096, bfloat16, random
data, pages of four layers in random order. Times are medians of graph replays. Figures in TB/s
count each byte once that must be read or written; TFLOP/s count the products of seen keys.
"""

import statistics
import sys
from collections.abc import Callable
from types import ModuleType

import torch

from benchmarks.common import Figures, Options, publish, show
from benchmarks.device_time import device_seconds
from paceline.core.kv_layout import PAGE_TOKENS, PageGroup

LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, INNER = 4, 32, 8, 128, 4096, 14336
GROUP = PageGroup("full", LAYERS, KV_HEADS, DIM, "bfloat16")
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2  # K and V of a layer
SCALE = DIM**-0.5
DECODES = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (64, 8192), (1, 131072))
MIXED = [100 + 37 * i % 1700 for i in range(256)]  # contexts, with two query heads a KV head
CHUNKS = ((1024, 1024), (2048, 8192), (8192, 8192))  # (query tokens, context)


def seconds(calls: list[Callable[[], object]], repeats: int = 7) -> float:
    """Of one call, when all are replayed one after the other."""
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = [device_seconds(graph.replay) for _ in range(repeats + 1)]
    return statistics.median(times[1:]) / len(calls)


def random_pool(num_pages: int) -> torch.Tensor:
    pool = torch.empty(num_pages, *GROUP.shape, dtype=torch.bfloat16, device="cuda")
    for start in range(0, num_pages, 4096):
        pool[start : start + 4096].normal_()
    return pool


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def tables(pool: torch.Tensor, num_sequences: int, context: int) -> torch.Tensor:
    blocks = -(-context // PAGE_TOKENS)
    pages = torch.randperm(len(pool), device="cuda")[: num_sequences * blocks]
    return pages.view(num_sequences, blocks)


def decode_attention(pool: torch.Tensor, contexts: list[int], num_heads: int = HEADS) -> float:
    """TB/s of keys and values."""
    from paceline.kernels.gpu.decode_attention import attend_decodes, plan_items

    table = tables(pool, len(contexts), max(contexts))
    lens = torch.tensor(contexts, device="cuda")
    query = random(len(contexts), num_heads, DIM)
    out = torch.empty_like(query)
    plan = plan_items(lens, max(contexts), KV_HEADS, 0)

    def attend(layer: int) -> Callable[[], None]:
        return lambda: attend_decodes(query, out, pool, layer, table, lens, plan, SCALE, 0.0)

    taken = seconds([attend(layer) for layer in range(LAYERS)])
    return sum(contexts) * TOKEN_BYTES / taken / 1e12


def prefill_attention(pool: torch.Tensor, query_len: int, context: int) -> float:
    """TFLOP/s."""
    from paceline.kernels.gpu.prefill_attention import attend_chunks

    table = tables(pool, 1, context)
    lens, starts = (torch.tensor(x, device="cuda") for x in ([context], [0, query_len]))
    query = random(query_len, HEADS, DIM)
    out = torch.empty_like(query)

    def attend(layer: int) -> Callable[[], None]:
        arrays = (table, lens, starts, query_len)
        return lambda: attend_chunks(query, out, pool, layer, *arrays, 0, SCALE, 0.0)

    taken = seconds([attend(layer) for layer in range(LAYERS)])
    seen = query_len * (context - query_len) + query_len * (query_len + 1) // 2
    return 4 * HEADS * DIM * seen / taken / 1e12


def rows(pool: torch.Tensor, num_tokens: int) -> dict[str, float]:
    """TB/s of what works row by row."""
    from paceline.kernels.gate import SILU
    from paceline.kernels.gpu import gate, kv_write, rmsnorm
    from paceline.kernels.rope import rope_tables

    qkv, x, gate_up = (
        random(num_tokens, n) for n in ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, 2 * INNER)
    )
    heads, weight = qkv.view(num_tokens, -1, DIM), random(HIDDEN)
    slots = torch.randperm(len(pool) * PAGE_TOKENS, device="cuda")[:num_tokens]
    angles = rope_tables(slots, torch.rand(DIM // 2, device="cuda"), 1.0, torch.float32)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "kv_write": (lambda: kv_write.write_kv(heads, pool, 1, slots, angles), 2 * qkv.nbytes),
        "rms_norm": (lambda: rmsnorm.rms_norm(x, weight, 1e-5), 2 * x.nbytes),
        "gate": (lambda: gate.gated(gate_up, SILU), gate_up.nbytes * 3 // 2),
    }
    return {name: size / seconds([call] * 4) / 1e12 for name, (call, size) in calls.items()}


def checksums(pool: torch.Tensor, num_pages: int) -> float:
    """TB/s."""
    from paceline.kernels.gpu.checksum import sum_pages

    pages = torch.randperm(len(pool), device="cuda")[:num_pages]
    return num_pages * GROUP.page_bytes / seconds([lambda: sum_pages(pool, pages, GROUP)]) / 1e12


def measure(options: Options) -> Figures:
    pool = random_pool(64 * 8192 // PAGE_TOKENS)
    show("attention")
    figures = {
        f"decode_{num}_at_{context}_tb_s": decode_attention(pool, [context] * num)
        for num, context in DECODES
    }
    figures["decode_256_mixed_tb_s"] = decode_attention(pool, MIXED, 2 * KV_HEADS)
    figures |= {
        f"prefill_{length}_of_{context}_tflop_s": prefill_attention(pool, length, context)
        for length, context in CHUNKS
    }
    show("rows, checksums")
    figures |= {f"{name}_8192_tb_s": value for name, value in rows(pool, 8192).items()}
    return figures | {f"checksum_{n}_tb_s": checksums(pool, n) for n in (64, len(pool))}


def problem() -> str:
    if not torch.cuda.is_available():
        return "a CUDA device; this machine has none"
    try:
        import triton
    except ImportError:
        return "triton"
    assert isinstance(triton, ModuleType)
    return ""


if __name__ == "__main__":
    if problem():
        show(f"gpu_kernels needs {problem()}")
        sys.exit(2)
    sys.exit(publish("gpu_kernels", measure))
