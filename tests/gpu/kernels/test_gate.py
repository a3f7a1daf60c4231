"""Gated activations against their definition."""

import pytest
import torch
from torch.nn import functional as F

from paceline.kernels.gate import GELU_TANH, SILU, gated_reference, gelu_tanh

gpu = pytest.importorskip("paceline.kernels.gpu.gate")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("inner", [1, 48, 1025])
def test_equals_the_definition(device: torch.device, inner: int, dtype: torch.dtype) -> None:
    x = (3 * torch.randn(5, 2 * inner)).to(device, dtype)
    for code, act in ((SILU, F.silu), (GELU_TANH, gelu_tanh)):
        found, expected = gpu.gated(x, code), gated_reference(x, act)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_large_numbers_do_not_overflow(device: torch.device) -> None:
    x = torch.tensor([[100.0, -100.0, 1.0, 1.0]], device=device)
    for code in (SILU, GELU_TANH):
        assert gpu.gated(x, code).tolist() == [[100.0, 0.0]]
