"""Golden KV: whoever changes what these say must raise the family's numerics_version.

KV with one name is exchanged between workers of different builds, so equal names must mean equal
numbers. Two sums stand for each (layer, plane): of all elements under fixed weights, and of the
second token of the second page.
"""

from pathlib import Path

import pytest
import torch

from paceline.models.architectures import MODELS
from paceline.models.fields import Fields
from paceline.models.loader import load_model
from paceline.models.registry import find_model
from tests.support.batches import Sequence, kv_of, new_pool, run
from tests.support.tiny_families import TINY_WRITERS

GOLDEN = {
    "llama": "9.4145 -2.464 13.3332 -5.9554 -0.2957 -0.1029 -0.7162 -0.321",
    "gpt2": "-5.2535 3.7193 -28.0093 42.0233 0.6547 0.7268 1.5404 -1.5303",
    "mistral": "-5.6062 -7.5231 -0.3651 2.1822 -13.5443 -1.0476"
    " 0.0429 -0.1537 -1.7216 1.1819 0.0171 0.47",
    "qwen2": "0.8052 -8.3963 -2.7049 0.7709 -9.0801 1.3416"
    " 2.6707 -2.3084 0.5029 -1.0271 2.6824 -2.2733",
    "qwen3": "-11.6131 -8.6094 26.0608 -5.8147 -18.8085 -0.6738"
    " -0.2944 -0.846 -2.9746 -0.5171 0.3417 0.4607",
    "phi3": "7.7757 0.9121 18.8979 4.4427 4.6222 -0.0511"
    " -0.8495 0.0104 -2.755 0.3204 -2.2631 0.8224",
    "gemma2": "-16.5128 -3.5448 -18.1165 -3.8348 7.125 -3.4221"
    " 1.2761 0.178 0.3835 0.6625 -0.1603 0.6829",
    "gemma3": "-16.4083 -3.4611 -41.8621 3.1579 2.2643 31.0047"
    " 3.6343 0.4307 4.3022 -0.4637 4.4441 -3.7406",
    "smollm3": "-7.7281 -1.6587 0.9141 0.2826 -5.1127 -0.945"
    " 0.5415 0.1238 -0.3872 -0.4231 -1.2825 -0.2081",
    "olmo2": "-21.4562 -1.9011 -3.0069 11.6106 -7.8973 5.0305"
    " -2.3418 -0.298 -2.3393 -1.7656 3.2636 1.1751",
    "mixtral": "-5.8184 -9.2566 -6.9103 -10.4052 -13.449 -14.4794"
    " 0.2311 -0.3924 -0.5181 -0.8057 -1.1273 0.1979",
    "qwen3_moe": "-4.2019 -5.4084 -10.7755 -0.6024 17.9859 4.6317"
    " -2.9977 -1.9767 -1.2029 0.067 5.5885 0.6293",
}


@pytest.mark.parametrize("family", TINY_WRITERS)
def test_kv_equals_the_golden_vectors(tmp_path: Path, family: str) -> None:
    model = load_model(TINY_WRITERS[family](tmp_path)).model
    pool = new_pool(model, 6)
    sequence = Sequence([4, 1, 3, 2])
    run(model, pool, [(sequence, [(5 * i * i + i) % 64 for i in range(64)])])
    pages = kv_of(model, pool)[sequence.pages].double()
    shape = pages[:, 0, 0].shape
    weights = torch.cos(0.7 * torch.arange(shape.numel(), dtype=torch.float64)).view(shape)
    everything = torch.einsum("plkhtd,phtd->lk", pages, weights)
    one_token = torch.einsum("lkhd,hd->lk", pages[1, :, :, :, 1], weights[0, :, 0])
    found = torch.cat((everything.flatten(), one_token.flatten()))
    expected = torch.tensor([float(n) for n in GOLDEN[family].split()], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("architecture", MODELS)
def test_the_version_that_the_golden_vectors_belong_to(architecture: str) -> None:
    _, found = find_model(Fields({"architectures": [architecture]}))
    assert found.numerics_version == 1
