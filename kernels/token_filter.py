"""Which logits of a row a token may have: min_p, top_k, top_p and typical_p, as two bounds.

Each filter works on what the one before it left, renormalised; p is the softmax of x / temperature.

    min_p       p ≥ min_p · largest p
    top_k       the top_k largest
    top_p       the largest, until their mass reaches top_p of the whole
    typical_p   those whose -ln p is nearest to the entropy, until their mass reaches typical_p

All keep one token at least. Tokens that are equal at a border stay together, so that the result
does not depend on the order of a sort; -inf is never kept.
"""

from dataclasses import dataclass

import torch

from paceline.kernels import backend, native

MIN_TEMPERATURE = 1e-30
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class Filters:
    """Of R rows, each [R]: float32, top_k int64. Off: min_p 0, top_k 0, top_p 1, typical_p 1."""

    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    typical_p: torch.Tensor


def filter_bounds(
    x: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, size] float32, its largest and the temperature of each row → lowest and highest
    number of each row that is kept, [R]. Of a row with NaN or without a finite number: anything."""
    if native.takes(x) and x.numel():
        return filter_bounds_cpu(x, best, temperature, filters)
    if backend.takes_rows(x):
        from paceline.kernels.gpu import token_filter as gpu

        return gpu.filter_bounds(x, best, temperature, filters)
    return filter_bounds_torch(x, best, temperature, filters)


def filter_bounds_cpu(
    x: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    filters: Filters,
    level: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by compiled code. `level` of instructions: the best where it is not given."""
    assert native.module is not None
    low, high = torch.empty_like(best), torch.empty_like(best)
    native.module.filter(
        x.contiguous().numpy(),
        best.numpy(),
        temperature.numpy(),
        filters.min_p.numpy(),
        filters.top_k.numpy(),
        filters.top_p.numpy(),
        filters.typical_p.numpy(),
        low.numpy(),
        high.numpy(),
        x.shape[1],
        torch.get_num_threads(),
        native.module.BEST_LEVEL if level is None else level,
    )
    return low, high


def filter_bounds_torch(
    x: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """By sorting, masses in float64; without waiting for a device."""
    temperature = temperature.double().clamp(min=MIN_TEMPERATURE)
    values, ids = x.sort(dim=1, descending=True)
    scaled = (values.double() - best.double()[:, None]) / temperature[:, None]
    bound = best.double() + temperature * filters.min_p.double().log()
    kept = (values >= bound.float()[:, None]) & (values >= _LOWEST)
    size = x.shape[1]
    num_kept = torch.where(filters.top_k > 0, filters.top_k, size).clamp(max=size)
    kept &= values >= values.gather(1, num_kept[:, None] - 1)
    masses = scaled.exp().masked_fill_(~kept, 0.0)
    kept &= _heaviest(values, masses, filters.top_p)
    masses.masked_fill_(~kept, 0.0)
    kept &= _most_typical(scaled.clamp(min=-1e30), masses, filters.typical_p)
    low = torch.where(kept, values, torch.inf).amin(dim=1)
    high = torch.where(kept, values, -torch.inf).amax(dim=1)
    return low, high


def _most_typical(scaled: torch.Tensor, masses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """-ln p differs from the entropy by as much as `scaled` differs from its mean."""
    mean = (masses * scaled).sum(dim=1) / masses.sum(dim=1)
    keys = -(scaled - mean[:, None]).abs().masked_fill_(masses == 0, torch.inf)
    ranked, order = keys.sort(dim=1, descending=True)
    kept = _heaviest(ranked, masses.gather(1, order), share)
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _heaviest(keys: torch.Tensor, masses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Of numbers in falling order those before which less than `share` of the mass lies, and
    their equals."""
    before = masses.cumsum(dim=1) - masses
    limit = share.double() * masses.sum(dim=1)
    last = (before < limit[:, None]).sum(dim=1).clamp(min=1) - 1
    return (keys >= keys.gather(1, last[:, None])) | (share >= 1)[:, None]
