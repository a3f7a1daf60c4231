"""Sampling noise as a function of (seed, choice, position, token id) alone.

    key  = mix(mix(mix(seed) + choice) + position)        per sampled token
    u    = (top 32 bits of mix(key + token id · φ) + ½) / 2^32
    noise = -ln(-ln u)                                     standard Gumbel

The largest (logit / temperature + noise) is a draw from the softmax. int64 tensors wrap the same on
CPU and CUDA; `mix` is the finaliser of splitmix64 (Steele, Lea, Flood 2014).
"""

import math

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
MAX_NOISE = -math.log(-math.log1p(-(2.0**-33)))
MIN_NOISE = -math.log(33 * math.log(2.0))


def mix(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def noise_keys(seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One int64 key for each sampled token."""
    return mix(mix(mix(seed) + choice) + position)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float64 noise for pairs (key, token id), both int64 of one shape."""
    high = mix(keys + token_ids * _GOLDEN) >> 32 & 0xFFFFFFFF
    uniform = (high.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))
