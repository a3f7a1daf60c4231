"""Paged attention by torch against its definition: odd sizes, mixed batches, memory full of NaN.

What compiled code does on the CPU is in test_attention_cpu.py.
"""

import random

import pytest
import torch

from paceline.core.kv_layout import PAGE_TOKENS, PageGroup
from paceline.kernels import attention, native
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


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "module", None)


def compute(
    spans: Spans, num_decodes: int, seed: int = 0, window: int = 0, softcap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, expected) for random KV in a pool that is NaN wherever no sequence has a token, or
    none that the window still reaches."""
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
            if not window or position > context_len - query_len - window:
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
        sorted({0, window}),
    )
    query = torch.randn(len(slots), NUM_QUERY_HEADS, 8, generator=generator)
    new_kv = torch.randn(len(slots), 4, 8, generator=generator)
    other_layers = pool[:, [0, 2]].clone()
    write_kv(pool, LAYER, new_kv, plan)
    found = paged_attention(query, pool, LAYER, plan, SCALE, window, softcap)
    torch.testing.assert_close(pool[:, [0, 2]], other_layers, equal_nan=True, rtol=0, atol=0)
    reference = paged_attention_reference(query, pool, LAYER, tables, spans, SCALE, window, softcap)
    return found, reference


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("window", [0, 1, 5, 16, 17, 40, 64, 100])
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
def test_equals_the_definition(spans: Spans, num_decodes: int, window: int, softcap: float) -> None:
    found, expected = compute(spans, num_decodes, window=window, softcap=softcap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("window", [0, 9, 30])
def test_equals_the_definition_in_small_pieces(
    monkeypatch: pytest.MonkeyPatch, window: int, softcap: float
) -> None:
    monkeypatch.setitem(attention._GATHER_BYTES, "cpu", 5 * 2 * 48 * 8 * 4)
    monkeypatch.setattr(attention, "_MAX_QUERIES", 16)
    monkeypatch.setattr(attention, "_MAX_SCORES", 1)
    spans = [(1, 40), (1, 9), (1, 33), (41, 90), (16, 20)]
    found, expected = compute(spans, 3, 5, window, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setitem(attention._GATHER_BYTES, "cpu", 1)
    found, expected = compute(spans, 3, 5, window, softcap)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 10])
def test_a_window_and_a_cap_change_the_result(window: int) -> None:
    spans = [(1, 40), (30, 30)]
    capped, _ = compute(spans, 1, window=window, softcap=0.7)
    usual, _ = compute(spans, 1, window=window)
    other, _ = compute(spans, 1, window=window + 1)
    for changed in (capped, other):
        rows = [0, -1]  # of the decode sequence, and of the chunk's end
        assert ((usual[rows] - changed[rows]).abs().amax(dim=(1, 2)) > 1e-3).all()


def test_windows_beyond_every_context_share_the_plan_of_none() -> None:
    pages, lens = torch.tensor([[1, 2]]), torch.tensor([20])
    slots = torch.tensor([36])
    plan = plan_attention(GROUP, slots, pages, lens, 20, [], torch.float32, [0, 19, 20, 64])
    assert plan.spans[0] is plan.spans[20] is plan.spans[64]
    assert plan.spans[19].window == 19


def test_a_window_bounds_what_a_decode_step_reads() -> None:
    pages, lens = torch.arange(100)[None], torch.tensor([1600])
    plan = plan_attention(GROUP, torch.tensor([0]), pages, lens, 1600, [], torch.float32, [40])
    decode = plan.spans[40].decode
    assert decode is not None
    assert decode.rows.shape == (2, GROUP.num_heads, 48)


def test_chunks_shrink_as_the_context_grows() -> None:
    device = torch.device("cpu")
    for longest in (1, 100, 8192, 1 << 17):
        mask = attention._prefill_mask(longest, 0, torch.float32, device)
        assert mask.shape[0] * longest <= 8 << 20 or mask.shape[0] == 16
    assert attention._prefill_mask(1 << 17, 100, torch.float32, device).shape == (256, 355)
    cut = attention._cut(attention._prefill_mask(100, 0, torch.float32, device), 3, 5)
    assert (cut == 0).tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]
