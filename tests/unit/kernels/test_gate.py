"""Gated activations against their definition."""

import pytest
import torch
from torch.nn import functional as F

from paceline.kernels import native
from paceline.kernels.gate import Activation, gated, gated_cpu, gated_reference, gelu_tanh

assert native.module is not None
LEVELS = range(native.module.BEST_LEVEL + 1)


def values(rows: int, inner: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(inner)
    x = torch.randn(rows, 2 * inner, generator=generator) * 10
    x[0, :4] = torch.tensor([0.0, -100.0, 100.0, 1e-20])
    return x


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("act", [F.silu, gelu_tanh])
@pytest.mark.parametrize(("rows", "inner"), [(1, 5), (3, 48), (70, 1000)])
def test_equals_the_definition(rows: int, inner: int, act: Activation, level: int) -> None:
    x = values(rows, inner)
    torch.testing.assert_close(
        gated_cpu(x, act, level), gated_reference(x, act), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("act", [F.silu, F.gelu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_activation_and_type(act: Activation, dtype: torch.dtype) -> None:
    x = values(3, 20).to(dtype)
    found = gated(x, act)
    assert found.dtype == dtype
    torch.testing.assert_close(found, gated_reference(x, act), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_a_number_stays_so(level: int) -> None:
    x = values(2, 40)
    x[1, 7] = float("nan")
    found = gated_cpu(x, F.silu, level)
    assert found[1, 7].isnan()
    assert found.isnan().sum() == 1
