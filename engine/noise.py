"""Sampling noise as a function of (seed, choice, position, token id) alone.

    key   = mix(mix(mix(seed) + choice) + position)       per sampled token
    v     = (top 32 bits of scramble(key + token id · φ) + ½) / 2^32
    noise = -ln(-ln(1 - v))                               standard Gumbel

The largest (logit / temperature + noise) is a draw from the softmax. The noise is large where v is
small, which is where float32 is fine-grained. int64 tensors wrap the same on CPU and CUDA; `mix` is
splitmix64 (Steele, Lea, Flood 2014), `scramble` the part of it that its top half depends on.
"""

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_LARGEST = 1 - 2.0**-24  # float32 below 1


def mix(x: torch.Tensor) -> torch.Tensor:
    x = _scramble(x + _GOLDEN)
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def noise_keys(seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One int64 key for each sampled token."""
    return mix(mix(mix(seed) + choice) + position)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 noise for pairs (key, token id): int64 tensors that broadcast."""
    high = _scramble(keys + token_ids * _GOLDEN) >> 32 & 0xFFFFFFFF
    v = high.float().add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST)
    return v.neg_().log1p_().neg_().log_().neg_()


def _scramble(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)).mul_(-4658895280553007687)
    return (x ^ (x >> 27 & 0x1FFFFFFFFF)).mul_(-7723592293110705685)
