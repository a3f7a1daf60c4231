"""Root mean square norm against its definition."""

import pytest
import torch

from paceline.kernels.rmsnorm import rms_norm, rms_norm_reference


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_equals_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(5, 33, generator=generator) * torch.logspace(-3, 3, 5)[:, None]).to(dtype)
    weight = torch.randn(33, generator=generator).to(dtype)
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    expected = rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
