"""The mock model with windows, and what it must say: its tokens over pages that are never freed."""

import functools
from typing import Any

import torch

from paceline.models.mock import MockModel
from tests.support.batches import Sequence, new_pool, run
from tests.unit.engine.benches import EOS, mock_model

MIXED = (20, 0, 20, 20)  # a full layer, three that see 20 tokens: groups of one layer
WINDOWS = {
    "mixed": MIXED,
    "padded": (0,) * 4 + (33,) * 11,  # groups of four layers, the last with room for one more
    "two windows": (0, 16, 40),
    "all alike": (24, 24),
    "one token": (0, 1),
}


@functools.cache
def windowed_model(kind: str) -> MockModel:
    windows = list(WINDOWS[kind])
    sizes: dict[str, Any] = {"num_hidden_layers": len(windows), "max_position_embeddings": 512}
    return mock_model(layer_windows=windows, **sizes)


@functools.cache
def expected_tokens(kind: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """Greedy, one forward pass over the whole text for each token."""
    model = windowed_model(kind)
    num_pages = -(-(len(prompt) + max_tokens) // 16)
    tokens = list(prompt)
    pool = new_pool(model, num_pages)
    sequence = Sequence(list(range(num_pages)))
    new = tokens
    while len(tokens) < len(prompt) + max_tokens and tokens[-1] != EOS:
        logits = run(model, pool, [(sequence, new)])
        new = [int(torch.argmax(logits[-1]))]
        tokens = tokens + new
    return tokens[len(prompt) :]
