"""Four ways to compute the logits of a sequence that must all agree."""

import torch

from paceline.models.base import Model
from tests.support.batches import Sequence, new_pool, run

WAYS = ("whole", "chunks", "decode", "cached prefix", "mixed batch")


def logits(model: Model, token_ids: list[int], way: str, device: str = "cpu") -> torch.Tensor:
    """[T, vocab] of every row, through a pool full of NaN with shuffled pages."""
    pool = new_pool(model, 40, device)
    sequence = Sequence([7, 3, 12, 5, 20, 1, 9, 15])
    if way == "whole":
        return run(model, pool, [(sequence, token_ids)], all_rows=True)
    if way == "chunks":
        return torch.cat(_pieces(model, pool, sequence, token_ids))
    if way == "decode":
        start = len(token_ids) // 2
        parts = [run(model, pool, [(sequence, token_ids[:start])], all_rows=True)]
        parts += [run(model, pool, [(sequence, [token])]) for token in token_ids[start:]]
        return torch.cat(parts)
    if way == "cached prefix":
        return _behind_a_shared_prefix(model, pool, sequence, token_ids)
    return _among_others(model, pool, sequence, token_ids)


def _pieces(
    model: Model, pool: torch.Tensor, sequence: Sequence, token_ids: list[int]
) -> list[torch.Tensor]:
    bounds = [0, 1, 14, 30, 47, len(token_ids)]
    pairs = zip(bounds, bounds[1:], strict=False)
    return [run(model, pool, [(sequence, token_ids[a:b])], all_rows=True) for a, b in pairs]


def _behind_a_shared_prefix(
    model: Model, pool: torch.Tensor, sequence: Sequence, token_ids: list[int]
) -> torch.Tensor:
    """Two pages computed by another request that went on differently."""
    other = Sequence([*sequence.pages[:2], 30, 31])
    first = run(model, pool, [(other, token_ids[:32] + [1, 2, 3])], all_rows=True)
    sequence.num_computed = 32
    rest = run(model, pool, [(sequence, token_ids[32:])], all_rows=True)
    return torch.cat((first[:32], rest))


def _among_others(
    model: Model, pool: torch.Tensor, sequence: Sequence, token_ids: list[int]
) -> torch.Tensor:
    """In one step: two decode rows, another chunk, and this sequence's second chunk."""
    short, long, chunk = Sequence([22]), Sequence([23, 24, 25]), Sequence([26, 27])
    run(model, pool, [(short, [4, 5]), (long, list(range(33)))])
    first = run(model, pool, [(sequence, token_ids[:20])], all_rows=True)
    work = [(short, [6]), (long, [7]), (chunk, [1, 2, 3]), (sequence, token_ids[20:])]
    return torch.cat((first, run(model, pool, work, all_rows=True)[5:]))
