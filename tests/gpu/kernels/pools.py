"""Pools for tests of attention: NaN wherever no sequence has a token that it sees."""

import random
from dataclasses import dataclass

import torch

from paceline.core.kv_layout import PAGE_TOKENS, PageGroup

Spans = list[tuple[int, int]]  # (query_len, context_len)


@dataclass(frozen=True, slots=True)
class Filled:
    pool: torch.Tensor
    tables: list[list[int]]
    block_table: torch.Tensor  # padded with a page that does not exist
    context_lens: torch.Tensor
    query_start: torch.Tensor


def filled(group: PageGroup, spans: Spans, device: torch.device, window: int = 0) -> Filled:
    counts = [-(-context_len // PAGE_TOKENS) for _, context_len in spans]
    # Twice as far from page to page as a page is long: kernels take a stride.
    shape = (sum(counts) + 2, 2 * group.num_layers, *group.shape[1:])
    dtype = getattr(torch, group.dtype)
    pool = torch.full(shape, float("nan"), dtype=dtype)[:, : group.num_layers]
    free = list(range(1, len(pool)))
    random.Random(len(spans)).shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    for pages, (query_len, context_len) in zip(tables, spans, strict=True):
        first = max(0, context_len - query_len + 1 - window) if window else 0
        for position in range(first, context_len):
            cell = pool[pages[position // PAGE_TOKENS], :, :, :, position % PAGE_TOKENS]
            cell.copy_(torch.randn(cell.shape))
    width = max(counts) + 3
    starts = [sum(query_len for query_len, _ in spans[:i]) for i in range(len(spans) + 1)]
    moved = torch.empty(shape, dtype=dtype, device=device)[:, : group.num_layers]
    moved.copy_(pool)
    return Filled(
        moved,
        tables,
        torch.tensor([p + [1 << 40] * (width - len(p)) for p in tables], device=device),
        torch.tensor([context_len for _, context_len in spans], device=device),
        torch.tensor(starts, device=device),
    )
