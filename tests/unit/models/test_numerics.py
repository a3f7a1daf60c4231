"""Golden KV: whoever changes what these say must raise the family's numerics_version.

KV with one name is exchanged between workers of different builds, so equal names must mean equal
numbers. Two sums stand for each (layer, plane): of all elements under fixed weights, and of the
second token of the second page.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.models.gpt2 import GPT2
from paceline.models.llama import Llama
from paceline.models.loader import load_model
from tests.support.batches import Sequence, new_pool, run
from tests.support.tiny_models import write_tiny_gpt2, write_tiny_llama

GOLDEN: dict[str, list[float]] = {
    "llama": [9.4145, -2.464, 13.3332, -5.9554, -0.2957, -0.1029, -0.7162, -0.321],
    "gpt2": [-5.2535, 3.7193, -28.0093, 42.0233, 0.6547, 0.7268, 1.5404, -1.5303],
}
WRITERS: dict[str, Callable[[Path], Path]] = {"llama": write_tiny_llama, "gpt2": write_tiny_gpt2}


@pytest.mark.parametrize("family", GOLDEN)
def test_kv_equals_the_golden_vectors(tmp_path: Path, family: str) -> None:
    model = load_model(WRITERS[family](tmp_path)).model
    pool = new_pool(model, 6)
    sequence = Sequence([4, 1, 3, 2])
    run(model, pool, [(sequence, [(5 * i * i + i) % 64 for i in range(64)])])
    pages = pool[sequence.pages].double()  # [pages, layers, planes, heads, tokens, dim]
    shape = pages[:, 0, 0].shape
    weights = torch.cos(0.7 * torch.arange(shape.numel(), dtype=torch.float64)).view(shape)
    everything = torch.einsum("plkhtd,phtd->lk", pages, weights)
    one_token = torch.einsum("lkhd,hd->lk", pages[1, :, :, :, 1], weights[0, :, 0])
    found = torch.cat((everything.flatten(), one_token.flatten()))
    expected = torch.tensor(GOLDEN[family], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_versions_that_the_golden_vectors_belong_to() -> None:
    assert Llama.numerics_version == 1
    assert GPT2.numerics_version == 1
