"""Gated products of many rows against float64: odd sizes, NaN in all memory around."""

import pytest
import torch
from torch.nn import functional as F

from paceline.kernels import backend
from paceline.kernels.gate import GELU_TANH, SILU, Activation, gelu_tanh

gpu = pytest.importorskip("paceline.kernels.gpu.gated_product")
pytestmark = [
    pytest.mark.gpu,  # the interpreter knows no wgmma
    pytest.mark.skipif(not backend.is_hopper(torch.device("cuda")), reason="needs a Hopper device"),
]


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    around = torch.full((shape[0] + 2, shape[1]), float("nan"), dtype=dtype, device="cuda")
    around[1:-1] = torch.randn(shape, device="cuda")
    return around[1:-1]


@pytest.mark.parametrize(("code", "act"), [(SILU, F.silu), (GELU_TANH, gelu_tanh)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_rows", "inner", "depth"),
    [(1, 8, 8), (129, 200, 72), (300, 1000, 584), (2000, 264, 4096), (1700, 2048, 64)],
)
def test_equals_the_definition(
    num_rows: int, inner: int, depth: int, dtype: torch.dtype, code: int, act: Activation
) -> None:
    x = random(num_rows, depth, dtype=dtype)
    weight = random(depth, 2 * inner, dtype=dtype)
    weight /= depth**0.5
    gate, up = (x.double() @ weight.double()).to(dtype).double().chunk(2, dim=1)
    expected = act(gate) * up
    assert gpu.fits(x, weight)
    found = gpu.gated(x, weight, code)
    assert found.dtype == dtype and found.isfinite().all()
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-2
