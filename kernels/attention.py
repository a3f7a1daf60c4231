"""Attention over a paged pool: writes of new KV, batched decode, prefill in query chunks.

A pool [pages, layers, planes, heads, PAGE_TOKENS, dim] is a table of rows of `dim` numbers, one a
(page, layer, plane, head, token). All index arithmetic is done once a step, for layer 0; a layer
is an offset into the table.

    plan = plan_attention(...)             once a step
    write_kv(pool, layer, kv, plan)        then, for every layer
    out = paged_attention(query, pool, layer, plan, scale)

Unused memory may hold anything, NaN included: places beyond a context are read from its first
token instead and masked, so garbage is never loaded. Only shapes and host integers decide what
is launched: a pure decode step can be captured in a CUDA graph.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline.core.kv_layout import PAGE_TOKENS, PageGroup

# K and V gathered at a time: bounds memory. Pieces that fit a cache were not faster on the CPU
# (32 sequences of 150 tokens: 2.3 ms a layer with 2 MiB, 1.6 with 8 and more, one thread).
_GATHER_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
_MAX_QUERIES = 256
_MAX_MASK_ELEMENTS = 8 << 20


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """All decode sequences; `rows` counts (sequence, head) pairs."""

    rows: torch.Tensor  # [2, D * heads, L]: pool rows of K and V
    mask: torch.Tensor  # [D * heads, 1, 1, L]: 0, or -inf beyond the context


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One sequence that brings several tokens."""

    start: int  # its first row among the T tokens
    query_len: int
    context_len: int
    rows: torch.Tensor  # [2, heads, context_len]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share."""

    group: PageGroup
    write_rows: torch.Tensor  # [T * 2 * heads]
    num_decodes: int
    decode: DecodePlan | None
    prefills: tuple[PrefillPlan, ...]
    causal: torch.Tensor | None  # [queries, past + queries]: see _causal_mask


def plan_attention(
    group: PageGroup,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    prefills: Sequence[tuple[int, int]],
    dtype: torch.dtype,
) -> AttentionPlan:
    """`prefills` holds (query_len, context_len) of the last sequences, the others decode."""
    num_decodes = block_table.shape[0] - len(prefills)
    decode = None
    if num_decodes:
        table, lens = block_table[:num_decodes], context_lens[:num_decodes]
        decode = _plan_decode(group, table, lens, max_context_len, dtype)
    plans = []
    start = num_decodes
    for (query_len, context_len), pages in zip(prefills, block_table[num_decodes:], strict=True):
        positions = torch.arange(context_len, device=pages.device)
        slots = _slots(pages[None], positions[None])
        rows = _rows(group, slots).view(2, group.num_heads, context_len)
        plans.append(PrefillPlan(start, query_len, context_len, rows))
        start += query_len
    longest = max((context_len for _, context_len in prefills), default=0)
    causal = _causal_mask(longest, dtype, block_table.device) if prefills else None
    writes = _rows(group, slot_mapping[:, None]).permute(1, 0, 2, 3).reshape(-1)
    return AttentionPlan(group, writes, num_decodes, decode, tuple(plans), causal)


def write_kv(pool: torch.Tensor, layer: int, kv: torch.Tensor, plan: AttentionPlan) -> None:
    """kv [T, 2 * heads, dim]: the new tokens' K heads, then V heads, into their slots."""
    table = _table(pool, layer, plan.group)
    table.index_copy_(0, plan.write_rows, kv.reshape(-1, plan.group.head_dim))


def paged_attention(
    query: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """query [T, query heads, dim] → the same shape; each token sees its context up to itself."""
    table = _table(pool, layer, plan.group)
    if plan.decode is not None and not plan.prefills:
        return _attend_decode(query, table, plan.decode, plan.group, scale)
    out = torch.empty_like(query)
    if plan.decode is not None:
        part = query[: plan.num_decodes]
        out[: plan.num_decodes] = _attend_decode(part, table, plan.decode, plan.group, scale)
    for prefill in plan.prefills:
        assert plan.causal is not None
        _attend_prefill(query, out, table, prefill, plan.causal, scale)
    return out


def _table(pool: torch.Tensor, layer: int, group: PageGroup) -> torch.Tensor:
    offset = layer * group.num_planes * group.num_heads * PAGE_TOKENS
    return pool.view(-1, group.head_dim)[offset:]


def _slots(pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Slots [B, L] of positions [B, L] under block tables [B, blocks]."""
    return pages.gather(1, positions // PAGE_TOKENS) * PAGE_TOKENS + positions % PAGE_TOKENS


def _rows(group: PageGroup, slots: torch.Tensor) -> torch.Tensor:
    """Rows [2, B, heads, L] of layer 0 for slots [B, L]."""
    rows_per_page = group.num_runs * group.num_heads * PAGE_TOKENS
    bases = slots // PAGE_TOKENS * rows_per_page + slots % PAGE_TOKENS
    cells = torch.arange(2 * group.num_heads, device=slots.device) * PAGE_TOKENS
    return bases[None, :, None, :] + cells.view(2, 1, group.num_heads, 1)


def _plan_decode(
    group: PageGroup,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    dtype: torch.dtype,
) -> DecodePlan:
    width = -(-max_context_len // PAGE_TOKENS) * PAGE_TOKENS
    positions = torch.arange(width, device=block_table.device)
    seen = positions < context_lens[:, None]
    rows = _rows(group, _slots(block_table, torch.where(seen, positions, 0)))
    zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    mask = zeros.masked_fill_(~seen, -math.inf)[:, None, None, None]
    mask = mask.expand(-1, group.num_heads, -1, -1, -1).flatten(0, 1)
    return DecodePlan(rows.flatten(1, 2), mask)


def _attend_decode(
    query: torch.Tensor, table: torch.Tensor, plan: DecodePlan, group: PageGroup, scale: float
) -> torch.Tensor:
    """Each KV head's group of query heads is one small attention of its own."""
    num_rows, width = plan.rows.shape[1:]
    grouped = query.reshape(num_rows, 1, -1, group.head_dim)
    out = torch.empty_like(grouped)
    step = _heads_at_once(query, width)
    for i in range(0, num_rows, step):
        part = slice(i, i + step)
        indices = plan.rows[:, part]
        kv = table.index_select(0, indices.reshape(-1)).view(*indices.shape, group.head_dim)
        out[part] = scaled_dot_product_attention(
            grouped[part], kv[0, :, None], kv[1, :, None], plan.mask[part], scale=scale
        )
    return out.view(query.shape)


def _heads_at_once(query: torch.Tensor, context_len: int) -> int:
    head_bytes = 2 * context_len * query.shape[-1] * query.element_size()
    return max(1, _GATHER_BYTES[query.device.type] // head_bytes)


def _causal_mask(longest: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[Q, longest + Q]: `longest` zeros, then a causal square. `_cut` takes any chunk's mask.

    Q falls with the context, so that the mask and the scores of a chunk stay bounded.
    """
    queries = max(16, min(_MAX_QUERIES, _MAX_MASK_ELEMENTS // longest, longest))
    mask = torch.full((queries, longest + queries), -math.inf, dtype=dtype, device=device)
    return mask.triu_(longest + 1)


def _cut(causal: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
    """Mask [num_queries, num_keys] whose last query sees all keys."""
    past = causal.shape[1] - causal.shape[0]
    mask = causal[:num_queries, past - (num_keys - num_queries) : past + num_queries]
    # torch's CUDA kernels read a mask in aligned words; a slice may start anywhere.
    return mask.clone() if mask.is_cuda else mask


def _attend_prefill(
    query: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    plan: PrefillPlan,
    causal: torch.Tensor,
    scale: float,
) -> None:
    """Heads in groups and queries in chunks: memory is bounded at any context."""
    _, num_heads, context_len = plan.rows.shape
    dim = query.shape[-1]
    sequence = slice(plan.start, plan.start + plan.query_len)
    # [T, heads, group, dim] → [heads, group, T, dim]
    shape = (plan.query_len, num_heads, -1, dim)
    grouped = query[sequence].view(shape).permute(1, 2, 0, 3)
    result = out[sequence].view(shape).permute(1, 2, 0, 3)
    step = _heads_at_once(query, context_len)
    for head in range(0, num_heads, step):
        heads = slice(head, head + step)
        indices = plan.rows[:, heads]
        kv = table.index_select(0, indices.reshape(-1)).view(*indices.shape, dim)
        _attend_chunks(grouped[heads], result[heads], kv, causal, scale)


def _attend_chunks(
    query: torch.Tensor, out: torch.Tensor, kv: torch.Tensor, causal: torch.Tensor, scale: float
) -> None:
    """query, out [heads, group, T, dim]; kv [2, heads, context, dim]."""
    num_tokens, context_len = query.shape[2], kv.shape[2]
    keys, values = (part[:, None].expand(-1, query.shape[1], -1, -1) for part in kv)
    for i in range(0, num_tokens, causal.shape[0]):
        chunk = slice(i, min(i + causal.shape[0], num_tokens))
        num_keys = context_len - num_tokens + chunk.stop
        mask = _cut(causal, chunk.stop - i, num_keys)
        out[:, :, chunk] = scaled_dot_product_attention(
            query[:, :, chunk], keys[:, :, :num_keys], values[:, :, :num_keys], mask, scale=scale
        )


def paged_attention_reference(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    scale: float,
) -> torch.Tensor:
    """The definition, token by token. `spans`: (query_len, context_len) of every sequence."""
    out = torch.empty_like(query)
    row = 0
    for pages, (query_len, context_len) in zip(block_tables, spans, strict=True):
        kv = torch.cat([pool[page, layer] for page in pages], dim=2)  # [2, heads, tokens, dim]
        for position in range(context_len - query_len, context_len):
            for head in range(query.shape[1]):
                kv_head = head * kv.shape[1] // query.shape[1]
                keys, values = kv[:, kv_head, : position + 1].double()
                weights = torch.softmax(keys @ query[row, head].double() * scale, dim=0)
                out[row, head] = (weights @ values).to(out.dtype)
            row += 1
    return out
