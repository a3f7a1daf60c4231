"""Compiled attention against its definition, at every level of instructions, amid NaN."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.core.kv_layout import PAGE_TOKENS, PageGroup
from paceline.kernels import native
from paceline.kernels.attention import paged_attention_reference, plan_attention, write_kv
from paceline.kernels.attention_cpu import PagedPlan, attend_paged, plan_paged

assert native.module is not None
LEVELS = range(native.module.BEST_LEVEL + 1)
LAYER, SCALE = 1, 0.3

Spans = list[tuple[int, int]]  # (query_len, context_len)


class Case:
    """Random KV of some sequences in shuffled pages; NaN wherever none has a token."""

    def __init__(self, spans: Spans, num_heads: int, group: PageGroup) -> None:
        generator = torch.Generator().manual_seed(len(spans))
        self.spans = spans
        counts = [-(-context_len // PAGE_TOKENS) for _, context_len in spans]
        self.pool = torch.full((sum(counts) + 2, *group.shape), float("nan"))
        free = list(range(len(self.pool)))
        random.Random(1).shuffle(free)
        self.tables = [[free.pop() for _ in range(count)] for count in counts]
        for pages, (_, context_len) in zip(self.tables, spans, strict=True):
            for position in range(context_len):
                cells = self.pool[pages[position // PAGE_TOKENS], ..., position % PAGE_TOKENS, :]
                cells.copy_(torch.randn(cells.shape, generator=generator))
        width = max(counts)
        table = [pages + [-1] * (width - len(pages)) for pages in self.tables]
        self.plan = PagedPlan(
            np.zeros(0, np.int64),
            np.cumsum([0, *(query_len for query_len, _ in spans)]),
            np.array([context_len for _, context_len in spans]),
            np.array(table),
        )
        num_rows = sum(query_len for query_len, _ in spans)
        heads = num_heads + 2 * group.num_heads  # queries are a part of the qkv product
        qkv = torch.randn(num_rows, heads, group.head_dim, generator=generator)
        self.query = qkv[:, :num_heads]

    def expected(self, window: int, softcap: float) -> torch.Tensor:
        return paged_attention_reference(
            self.query, self.pool, LAYER, self.tables, self.spans, SCALE, window, softcap
        )

    def found(self, window: int, softcap: float, level: int) -> torch.Tensor:
        return attend_paged(self.query, self.pool, LAYER, self.plan, SCALE, window, softcap, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (1, 0.0), (20, 0.7), (150, 0.0)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(6, 2, 8), (3, 3, 64), (20, 1, 24), (4, 2, 80), (9, 3, 64), (5, 1, 16), (14, 2, 128)],
)
@pytest.mark.parametrize(
    "spans",
    [
        [(1, 1)],
        [(1, 17), (1, 300), (1, 64)],
        [(1, 20), (50, 50), (7, 37), (18, 150)],
    ],
)
def test_equals_the_definition(
    spans: Spans,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int,
    softcap: float,
    level: int,
) -> None:
    case = Case(spans, num_heads, PageGroup("full", 2, num_kv_heads, head_dim))
    expected = case.expected(window, softcap)
    found = case.found(window, softcap, level)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 128), (4, 80), (6, 16), (12, 64)])
def test_a_decoded_token_equals_the_same_token_in_a_prompt(
    num_heads: int, head_dim: int, window: int, level: int
) -> None:
    whole = Case([(300, 300)], num_heads, PageGroup("full", 2, 2, head_dim))
    expected = whole.found(window, 0.0, level)
    for length in (1, 40, 129, 300):
        last = slice(length - 1, length)
        plan = replace(whole.plan, query_start=np.array([0, 1]), context_lens=np.array([length]))
        one = attend_paged(whole.query[last], whole.pool, LAYER, plan, SCALE, window, 0.0, level)
        assert torch.equal(one, expected[last])


@pytest.mark.parametrize("level", LEVELS)
def test_large_scores_do_not_overflow(level: int) -> None:
    case = Case([(1, 40), (20, 30)], 4, PageGroup("full", 2, 2, 16))
    case.query.mul_(300)
    torch.testing.assert_close(
        case.found(0, 0.0, level), case.expected(0, 0.0), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("level", LEVELS)
def test_a_key_that_is_not_a_number_is_seen_in_the_result(level: int) -> None:
    case = Case([(1, 40), (1, 40)], 4, PageGroup("full", 2, 2, 16))
    case.pool[case.tables[0][1], LAYER, 0, :, 3] = float("nan")
    found = case.found(0, 0.0, level)
    assert found[0].isnan().all()
    assert not found[1].isnan().any()


def test_refuses_pages_outside_the_pool() -> None:
    case = Case([(1, 40)], 4, PageGroup("full", 2, 2, 16))
    for page in (-1, len(case.pool)):
        case.plan.block_table[0, 1] = page
        with pytest.raises(IndexError, match=rf"block_table\[0, 1\]={page}"):
            case.found(0, 0.0, 0)
        case.found(1, 0.0, 0)  # the window does not reach that page


def test_refuses_rows_and_layers_that_do_not_exist() -> None:
    case = Case([(2, 40)], 4, PageGroup("full", 2, 2, 16))
    with pytest.raises(ValueError, match="layer 2 of 2"):
        attend_paged(case.query, case.pool, 2, case.plan, SCALE, 0, 0.0)
    case.plan.query_start[1] = 3
    with pytest.raises(ValueError, match="rows 0 to 3 of 2"):
        case.found(0, 0.0, 0)


def test_leaves_other_types_and_heads_to_torch() -> None:
    table, lens = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for head_dim, dtype, fits in [
        (64, torch.float32, True),
        (64, torch.bfloat16, False),
        (12, torch.float32, False),
        (512, torch.float32, False),
    ]:
        group = PageGroup("full", 1, 1, head_dim)
        assert (plan_paged(group, lens, table, lens, [], dtype) is not None) is fits


def test_writes_new_tokens_into_their_slots_and_nothing_else() -> None:
    group = PageGroup("full", 3, 2, 8)
    pool = torch.zeros(5, *group.shape)
    slots = torch.randperm(5 * PAGE_TOKENS, generator=torch.Generator().manual_seed(1))[:70]
    qkv = torch.randn(70, 7, 8)
    table, lens = torch.zeros(70, 1, dtype=torch.int64), torch.ones(70, dtype=torch.int64)
    plan = plan_attention(group, slots, table, lens, 1, [], torch.float32)
    assert plan.paged is not None
    write_kv(pool, LAYER, qkv[:, 3:], plan)
    expected = torch.zeros_like(pool)
    for slot, kv in zip(slots.tolist(), qkv[:, 3:], strict=True):
        page, offset = divmod(slot, PAGE_TOKENS)
        expected[page, LAYER, :, :, offset] = kv.view(2, 2, 8)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("slot", [-1, 5 * PAGE_TOKENS])
def test_refuses_slots_outside_the_pool(slot: int) -> None:
    group = PageGroup("full", 3, 2, 8)
    pool = torch.zeros(5, *group.shape)
    table, lens = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    plan = plan_attention(group, torch.tensor([0, slot]), table, lens, 1, [], torch.float32)
    with pytest.raises(IndexError, match=rf"slot_mapping\[1\]={slot}"):
        write_kv(pool, LAYER, torch.ones(2, 4, 8), plan)
    assert not pool.any()
