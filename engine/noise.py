"""Keys of the sampling noise, so that it is a function of (seed, choice, position, token id) alone.

    key = mix(mix(mix(seed) + choice) + position)       per sampled token

`mix` is splitmix64 (Steele, Lea, Flood 2014). kernels/gumbel_max.py makes noise of a key and an id.
"""

import torch

from paceline.kernels.gumbel_max import GOLDEN, scramble


def mix(x: torch.Tensor) -> torch.Tensor:
    x = scramble(x + GOLDEN)
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def noise_keys(seed: torch.Tensor, choice: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One int64 key for each sampled token."""
    return mix(mix(mix(seed) + choice) + position)
