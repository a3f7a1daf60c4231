"""Attention over a paged pool: writes of new KV, batched decode, prefill in query chunks.

A pool [pages, layers, planes, heads, PAGE_TOKENS, dim] is a table of rows of `dim` numbers, one a
(page, layer, plane, head, token). All index arithmetic is done once a step, for layer 0; a layer
is an offset into the table.

    plan = plan_attention(...)             once a step
    write_kv(pool, layer, kv, plan)        then, for every layer; see kernels/kv_write.py
    out = paged_attention(query, pool, layer, plan, scale)

A window w lets a token see the last w tokens, itself included; 0 means all. Only those are read.
A soft cap c turns a score s into c · tanh(s / c) before the softmax; 0 means none.

Unused memory may hold anything, NaN included: places beyond a context are read from its first
token instead and masked, so garbage is never loaded. Only shapes and host integers decide what
is launched: a pure decode step can be captured in a CUDA graph.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline.core.kv_layout import PAGE_TOKENS, PageGroup
from paceline.kernels import backend
from paceline.kernels.attention_cpu import PagedPlan, attend_paged, plan_paged, write_paged

if TYPE_CHECKING:
    from paceline.kernels.gpu.attention import GpuPlan

# K and V gathered at a time: bounds memory. Pieces that fit a cache were not faster on the CPU
# (32 sequences of 150 tokens: 2.3 ms a layer with 2 MiB, 1.6 with 8 and more, one thread).
_GATHER_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
_MAX_QUERIES = 256
_MAX_MASK_ELEMENTS = 8 << 20
_MAX_SCORES = 16 << 20  # that are held at a time where they are capped


@dataclass(frozen=True, slots=True)
class Scores:
    scale: float
    softcap: float  # 0: none


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """All decode sequences; `rows` counts (sequence, head) pairs."""

    rows: torch.Tensor  # [2, D * heads, L]: pool rows of K and V, of the window's first token on
    mask: torch.Tensor  # [D * heads, 1, 1, L]: 0, or -inf beyond the context


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One sequence that brings several tokens."""

    start: int  # its first row among the T tokens
    query_len: int
    rows: torch.Tensor  # [2, heads, keys]: the last tokens of the context, all that any query sees


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """What layers of one window share."""

    window: int  # 0: none, or none that this step's contexts reach
    decode: DecodePlan | None
    prefills: tuple[PrefillPlan, ...]
    mask: torch.Tensor | None  # [queries, past + queries]: see _prefill_mask


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share."""

    group: PageGroup
    write_rows: torch.Tensor  # [T * 2 * heads]; unused where `paged` or `gpu`
    num_decodes: int
    spans: dict[int, SpanPlan]  # by window
    paged: PagedPlan | None  # compiled code does it, without spans
    gpu: "GpuPlan | None" = None  # Triton's kernels do it, without spans


def plan_attention(
    group: PageGroup,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    prefills: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    windows: Sequence[int] = (0,),
) -> AttentionPlan:
    """`prefills` holds (query_len, context_len) of the last sequences, the others decode.
    `windows`: those of the model's layers, each once."""
    num_decodes = block_table.shape[0] - len(prefills)
    paged = plan_paged(group, slot_mapping, block_table, context_lens, prefills, dtype)
    if paged is not None:
        return AttentionPlan(group, slot_mapping, num_decodes, {}, paged)
    if backend.uses_triton(block_table):
        from paceline.kernels.gpu.attention import plan_gpu

        lens = (context_lens, max_context_len)
        gpu = plan_gpu(group.num_heads, slot_mapping, block_table, *lens, prefills, windows)
        return AttentionPlan(group, slot_mapping, num_decodes, {}, None, gpu)
    longest = max([max_context_len, *(context_len for _, context_len in prefills)])
    spans: dict[int, SpanPlan] = {}
    for window in windows:
        reached = window if window < longest else 0
        known = [span for span in spans.values() if span.window == reached]
        spans[window] = (
            known[0]
            if known
            else _plan_span(
                group, block_table, context_lens, max_context_len, prefills, dtype, reached
            )
        )
    writes = _rows(group, slot_mapping[:, None]).permute(1, 0, 2, 3).reshape(-1)
    return AttentionPlan(group, writes, num_decodes, spans, None)


def write_kv(pool: torch.Tensor, layer: int, kv: torch.Tensor, plan: AttentionPlan) -> None:
    """kv [T, 2 * heads, dim]: the new tokens' K heads, then V heads, into their slots.

    Not for a plan of Triton's kernels, which write while they rotate."""
    assert plan.gpu is None
    if plan.paged is not None:
        write_paged(pool, layer, kv, plan.paged)
        return
    table = _table(pool, layer, plan.group)
    table.index_copy_(0, plan.write_rows, kv.reshape(-1, plan.group.head_dim))


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    plan: AttentionPlan,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """query [T, query heads, dim] → the same shape; each token sees its context up to itself."""
    if plan.paged is not None:
        return attend_paged(query, pool, layer, plan.paged, scale, window, softcap)
    if plan.gpu is not None:
        from paceline.kernels.gpu.attention import attend

        return attend(query, pool, layer, plan.gpu, scale, window, softcap)
    table = _table(pool, layer, plan.group)
    span = plan.spans[window]
    scores = Scores(scale, softcap)
    if span.decode is not None and not span.prefills:
        return _attend_decode(query, table, span.decode, scores)
    out = torch.empty_like(query)
    if span.decode is not None:
        part = query[: plan.num_decodes]
        out[: plan.num_decodes] = _attend_decode(part, table, span.decode, scores)
    for prefill in span.prefills:
        assert span.mask is not None
        _attend_prefill(query, out, table, prefill, span.mask, span.window, scores)
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


def _plan_span(
    group: PageGroup,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    prefills: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    window: int,
) -> SpanPlan:
    num_decodes = block_table.shape[0] - len(prefills)
    decode = None
    if num_decodes:
        table, lens = block_table[:num_decodes], context_lens[:num_decodes]
        decode = _plan_decode(group, table, lens, max_context_len, dtype, window)
    plans = []
    start = num_decodes
    for (query_len, context_len), pages in zip(prefills, block_table[num_decodes:], strict=True):
        first = max(0, context_len - query_len + 1 - window) if window else 0
        positions = torch.arange(first, context_len, device=pages.device)
        rows = _rows(group, _slots(pages[None], positions[None]))
        plans.append(PrefillPlan(start, query_len, rows.view(2, group.num_heads, -1)))
        start += query_len
    longest = max((context_len for _, context_len in prefills), default=0)
    mask = _prefill_mask(longest, window, dtype, block_table.device) if prefills else None
    return SpanPlan(window, decode, tuple(plans), mask)


def _plan_decode(
    group: PageGroup,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    dtype: torch.dtype,
    window: int,
) -> DecodePlan:
    longest = min(max_context_len, window or max_context_len)
    width = -(-longest // PAGE_TOKENS) * PAGE_TOKENS
    positions = torch.arange(width, device=block_table.device)
    if window:
        positions = positions + (context_lens[:, None] - window).clamp_(min=0)
    seen = positions < context_lens[:, None]
    first = positions[:, :1] if window else 0
    rows = _rows(group, _slots(block_table, torch.where(seen, positions, first)))
    zeros = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    mask = zeros.masked_fill_(~seen, -math.inf)[:, None, None, None]
    mask = mask.expand(-1, group.num_heads, -1, -1, -1).flatten(0, 1)
    return DecodePlan(rows.flatten(1, 2), mask)


def _attend_decode(
    query: torch.Tensor, table: torch.Tensor, plan: DecodePlan, scores: Scores
) -> torch.Tensor:
    """Each KV head's group of query heads is one small attention of its own."""
    num_rows, width = plan.rows.shape[1:]
    dim = query.shape[-1]
    grouped = query.reshape(num_rows, 1, -1, dim)
    out = torch.empty_like(grouped)
    step = _heads_at_once(query, width)
    for i in range(0, num_rows, step):
        part = slice(i, i + step)
        indices = plan.rows[:, part]
        kv = table.index_select(0, indices.reshape(-1)).view(*indices.shape, dim)
        out[part] = _attend(grouped[part], kv[0, :, None], kv[1, :, None], plan.mask[part], scores)
    return out.view(query.shape)


def _heads_at_once(query: torch.Tensor, context_len: int) -> int:
    head_bytes = 2 * context_len * query.shape[-1] * query.element_size()
    return max(1, _GATHER_BYTES[query.device.type] // head_bytes)


def _prefill_mask(
    longest: int, window: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[Q, past + Q]: query i sees columns up to past + i, of a window only its last. `past` is
    the most that a chunk's first query sees before itself. `_cut` takes any chunk's mask.

    Q falls with the keys, so that the mask and the scores of a chunk stay bounded.
    """
    past = window - 1 if window else longest
    queries = max(16, min(_MAX_QUERIES, _MAX_MASK_ELEMENTS // max(past, 1), longest))
    hidden = torch.ones((queries, past + queries), dtype=torch.bool, device=device)
    unseen = hidden.triu(past + 1)
    if window:
        unseen |= hidden.tril(past - window)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(unseen, -math.inf)


def _cut(mask: torch.Tensor, num_queries: int, num_keys: int) -> torch.Tensor:
    """Mask [num_queries, num_keys] whose last query sees the last key."""
    past = mask.shape[1] - mask.shape[0]
    part = mask[:num_queries, past - (num_keys - num_queries) : past + num_queries]
    # torch's CUDA kernels read a mask in aligned words; a slice may start anywhere.
    return part.clone() if part.is_cuda else part


def _attend_prefill(
    query: torch.Tensor,
    out: torch.Tensor,
    table: torch.Tensor,
    plan: PrefillPlan,
    mask: torch.Tensor,
    window: int,
    scores: Scores,
) -> None:
    """Heads in groups and queries in chunks: memory is bounded at any context."""
    _, num_heads, num_keys = plan.rows.shape
    dim = query.shape[-1]
    sequence = slice(plan.start, plan.start + plan.query_len)
    # [T, heads, group, dim] → [heads, group, T, dim]
    shape = (plan.query_len, num_heads, -1, dim)
    grouped = query[sequence].view(shape).permute(1, 2, 0, 3)
    result = out[sequence].view(shape).permute(1, 2, 0, 3)
    step = _heads_at_once(query, num_keys)
    for head in range(0, num_heads, step):
        heads = slice(head, head + step)
        indices = plan.rows[:, heads]
        kv = table.index_select(0, indices.reshape(-1)).view(*indices.shape, dim)
        _attend_chunks(grouped[heads], result[heads], kv, mask, window, scores)


def _attend_chunks(
    query: torch.Tensor,
    out: torch.Tensor,
    kv: torch.Tensor,
    mask: torch.Tensor,
    window: int,
    scores: Scores,
) -> None:
    """query, out [heads, group, T, dim]; kv [2, heads, keys, dim], the last T keys are new."""
    num_tokens, num_keys = query.shape[2], kv.shape[2]
    keys, values = (part[:, None].expand(-1, query.shape[1], -1, -1) for part in kv)
    for i in range(0, num_tokens, mask.shape[0]):
        chunk = slice(i, min(i + mask.shape[0], num_tokens))
        own = num_keys - num_tokens + i  # the key of the chunk's first query
        first = max(0, own + 1 - window) if window else 0
        seen = slice(first, own + chunk.stop - i)
        part = _cut(mask, chunk.stop - i, seen.stop - first)
        out[:, :, chunk] = _attend(
            query[:, :, chunk], keys[:, :, seen], values[:, :, seen], part, scores
        )


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """query [N, G, Q, dim], keys and values [N, G or 1, L, dim], mask for [N, G, Q, L]."""
    if not scores.softcap:
        return scaled_dot_product_attention(query, keys, values, mask, scale=scores.scale)
    out = torch.empty_like(query)
    step = max(1, _MAX_SCORES // (query[0, ..., 0].numel() * keys.shape[2]))
    for i in range(0, len(query), step):
        part = slice(i, i + step)
        found = torch.matmul(query[part], keys[part].transpose(-1, -2)).float()
        found.mul_(scores.scale / scores.softcap).tanh_().mul_(scores.softcap)
        found += mask[part] if mask.dim() == found.dim() else mask
        out[part] = torch.matmul(torch.softmax(found, dim=-1).to(values.dtype), values[part])
    return out


def paged_attention_reference(
    query: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    block_tables: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """The definition, token by token. `spans`: (query_len, context_len) of every sequence."""
    out = torch.empty_like(query)
    row = 0
    for pages, (query_len, context_len) in zip(block_tables, spans, strict=True):
        kv = torch.cat([pool[page, layer] for page in pages], dim=2)  # [2, heads, tokens, dim]
        for position in range(context_len - query_len, context_len):
            first = max(0, position + 1 - window) if window else 0
            for head in range(query.shape[1]):
                kv_head = head * kv.shape[1] // query.shape[1]
                keys, values = kv[:, kv_head, first : position + 1].double()
                scores = keys @ query[row, head].double() * scale
                if softcap:
                    scores = torch.tanh(scores / softcap) * softcap
                out[row, head] = (torch.softmax(scores, dim=0) @ values).to(out.dtype)
            row += 1
    return out
