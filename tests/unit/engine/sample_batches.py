"""Rows to draw from."""

from typing import Any

import numpy as np
import torch

from paceline.engine.sampler import SampleBatch

VOCAB = 2000


def batch(num: int, **arrays: Any) -> SampleBatch:
    defaults: dict[str, Any] = {
        "rows": np.arange(num),
        "temperature": np.ones(num, np.float32),
        "min_p": np.zeros(num, np.float32),
        "top_k": np.zeros(num, np.int64),
        "top_p": np.ones(num, np.float32),
        "typical_p": np.ones(num, np.float32),
        "seed": np.arange(num) * 7919,
        "choice": np.zeros(num, np.int64),
        "position": np.zeros(num, np.int64),
        "num_logprobs": np.full(num, -1, np.int64),
    }
    for name, value in arrays.items():
        like = defaults.get(name)
        if isinstance(like, np.ndarray) and not isinstance(value, np.ndarray):
            value = np.full(num, value, like.dtype)
        defaults[name] = value
    return SampleBatch(**defaults)


def logits_of(num_rows: int, spread: float = 3.0, vocab: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(num_rows, vocab, generator=generator) * spread
