"""RMS norm against its definition."""

import pytest
import torch

from paceline.kernels.rmsnorm import rms_norm_reference

gpu = pytest.importorskip("paceline.kernels.gpu.rmsnorm")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 17, 576, 1000])
def test_equals_the_definition(
    device: torch.device, size: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    rows = torch.full((3, size + 5), float("nan"))
    rows[:, :size] = torch.randn(3, size)
    x = rows.to(device, dtype)[:, :size]
    weight = torch.randn(size).to(device, weight_dtype)
    residual = torch.randn(3, size).to(device, dtype)
    tolerance = max(TOLERANCE[dtype], TOLERANCE[weight_dtype])
    expected = rms_norm_reference(x, weight, 1e-5).float()
    found = gpu.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    found = gpu.rms_norm(x, weight, 1e-5, residual).float()
    expected = expected + residual.float()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_no_rows(device: torch.device) -> None:
    x = torch.empty(0, 8, device=device)
    assert gpu.rms_norm(x, torch.ones(8, device=device), 1e-5).shape == (0, 8)
