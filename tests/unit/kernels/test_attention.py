"""Paged attention against its definition: odd sizes, mixed batches, memory full of NaN."""

import random

import pytest
import torch

from paceline.core.kv_layout import PAGE_TOKENS, PageGroup
from paceline.kernels import attention
from paceline.kernels.attention import (
    paged_attention,
    paged_attention_reference,
    plan_attention,
    write_kv,
)

GROUP = PageGroup("full", num_layers=3, num_heads=2, head_dim=8)
NUM_QUERY_HEADS = 6
LAYER = 1
SCALE = 0.3

Spans = list[tuple[int, int]]  # (query_len, context_len)


def compute(spans: Spans, num_decodes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, expected) for random KV in a pool that is NaN wherever no sequence has a token."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context_len // PAGE_TOKENS) for _, context_len in spans]
    pool = torch.full((sum(counts) + 2, *GROUP.shape), float("nan"))
    free = list(range(1, len(pool)))
    random.Random(seed).shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    slots: list[int] = []
    for pages, (query_len, context_len) in zip(tables, spans, strict=True):
        for position in range(context_len):
            page, offset = pages[position // PAGE_TOKENS], position % PAGE_TOKENS
            pool[page, :, :, :, offset] = torch.randn(3, 2, 2, 8, generator=generator)
            if position >= context_len - query_len:
                slots.append(page * PAGE_TOKENS + offset)
                pool[page, LAYER, :, :, offset] = float("nan")  # write_kv must bring it
    width = max(counts)
    plan = plan_attention(
        GROUP,
        torch.tensor(slots),
        torch.tensor([pages + [0] * (width - len(pages)) for pages in tables]),
        torch.tensor([context_len for _, context_len in spans]),
        max((context_len for _, context_len in spans[:num_decodes]), default=0),
        spans[num_decodes:],
        torch.float32,
    )
    query = torch.randn(len(slots), NUM_QUERY_HEADS, 8, generator=generator)
    new_kv = torch.randn(len(slots), 4, 8, generator=generator)
    other_layers = pool[:, [0, 2]].clone()
    write_kv(pool, LAYER, new_kv, plan)
    found = paged_attention(query, pool, LAYER, plan, SCALE)
    torch.testing.assert_close(pool[:, [0, 2]], other_layers, equal_nan=True, rtol=0, atol=0)
    return found, paged_attention_reference(query, pool, LAYER, tables, spans, SCALE)


@pytest.mark.parametrize(
    ("spans", "num_decodes"),
    [
        ([(1, 1)], 1),
        ([(1, 17), (1, 1), (1, 64), (1, 33)], 4),
        ([(1, 1)], 0),
        ([(50, 50)], 0),
        ([(5, 37), (16, 16), (1, 40)], 0),
        ([(1, 20), (1, 3), (7, 7), (18, 50)], 2),
    ],
)
def test_equals_the_definition(spans: Spans, num_decodes: int) -> None:
    found, expected = compute(spans, num_decodes)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_equals_the_definition_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention._GATHER_BYTES, "cpu", 5 * 2 * 48 * 8 * 4)
    monkeypatch.setattr(attention, "_MAX_QUERIES", 16)
    spans = [(1, 40), (1, 9), (1, 33), (41, 90), (16, 20)]
    found, expected = compute(spans, 3, seed=5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setitem(attention._GATHER_BYTES, "cpu", 1)
    torch.testing.assert_close(compute(spans, 3, seed=5)[0], expected, rtol=1e-5, atol=1e-5)


def test_chunks_shrink_as_the_context_grows() -> None:
    device = torch.device("cpu")
    for longest in (1, 100, 8192, 1 << 17):
        mask = attention._causal_mask(longest, torch.float32, device)
        assert mask.shape[0] * longest <= 8 << 20 or mask.shape[0] == 16
    cut = attention._cut(attention._causal_mask(100, torch.float32, device), 3, 5)
    assert (cut == 0).tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]
