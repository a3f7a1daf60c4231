"""Builds `ForwardBatch`es for tests, as the engine would."""

from dataclasses import dataclass

import torch

from paceline.core.kv_layout import PAGE_TOKENS
from paceline.models.base import ForwardBatch, Model, PrefillChunk


@dataclass(slots=True)
class Sequence:
    """A request's pages and how much of it is computed. With G page groups page p stands for
    pages p · G … p · G + G - 1, one a group."""

    pages: list[int]
    num_computed: int = 0


def new_pool(model: Model, num_pages: int, device: str = "cpu") -> torch.Tensor:
    """A pool full of NaN: what is read without being written shows."""
    page = model.layout.page
    shape = (num_pages * len(model.layout.groups), *page.shape)
    return torch.full(shape, float("nan"), dtype=getattr(torch, page.dtype), device=device)


def run(
    model: Model,
    pool: torch.Tensor,
    work: list[tuple[Sequence, list[int]]],
    all_rows: bool = False,
) -> torch.Tensor:
    """One forward of new tokens of some sequences, those with a single token first.

    Returns logits of the last row of each, or of all rows, in the order of `work`.
    """
    batch = make_batch(model, work, all_rows, str(pool.device))
    with torch.inference_mode():
        logits = model.forward(batch, (pool,))
    for sequence, tokens in work:
        sequence.num_computed += len(tokens)
    return logits


def kv_of(model: Model, pool: torch.Tensor) -> torch.Tensor:
    """[pages, layers, planes, heads, tokens, dim], pages as sequences name them."""
    pages = pool.unflatten(0, (-1, len(model.layout.groups)))
    return torch.stack([pages[:, group, index] for group, index in model.layout.layers], dim=1)


def make_batch(
    model: Model,
    work: list[tuple[Sequence, list[int]]],
    all_rows: bool = False,
    device: str = "cpu",
) -> ForwardBatch:
    num_groups = len(model.layout.groups)
    lens = [len(tokens) for _, tokens in work]
    num_decodes = next((i for i, n in enumerate(lens) if n > 1), len(lens))
    positions = [range(s.num_computed, s.num_computed + len(t)) for s, t in work]
    contexts = [p.stop for p in positions]
    places = [
        (sequence.pages[p // PAGE_TOKENS] * num_groups, p % PAGE_TOKENS)
        for (sequence, _), span in zip(work, positions, strict=True)
        for p in span
    ]
    used = [s.pages[: -(-c // PAGE_TOKENS)] for (s, _), c in zip(work, contexts, strict=True)]
    width = max(map(len, used))
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return ForwardBatch(
        token_ids=tensor([token for _, tokens in work for token in tokens]),
        positions=tensor([p for span in positions for p in span]),
        slot_mappings=tuple(
            tensor([(page + i) * PAGE_TOKENS + offset for page, offset in places])
            for i in range(num_groups)
        ),
        query_start=tensor(starts),
        context_lens=tensor(contexts),
        block_tables=tuple(
            tensor([[p * num_groups + i for p in s] + [0] * (width - len(s)) for s in used])
            for i in range(num_groups)
        ),
        logits_rows=tensor(range(starts[-1]) if all_rows else [s - 1 for s in starts[1:]]),
        max_query_len=max(lens),
        max_context_len=max(contexts[:num_decodes], default=0),
        prefills=tuple(map(PrefillChunk, lens[num_decodes:], contexts[num_decodes:])),
    )
