"""Root mean square norm against its definition."""

import pytest
import torch

from paceline.kernels import native
from paceline.kernels.rmsnorm import rms_norm, rms_norm_cpu, rms_norm_reference

assert native.module is not None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_equals_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(5, 33, generator=generator) * torch.logspace(-3, 3, 5)[:, None]).to(dtype)
    weight = torch.randn(33, generator=generator).to(dtype)
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    expected = rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", range(native.module.BEST_LEVEL + 1))
@pytest.mark.parametrize(("rows", "dim"), [(1, 3), (5, 33), (7, 576), (90, 1000)])
def test_compiled_code_equals_the_definition(rows: int, dim: int, level: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(rows, dim, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    weight = torch.randn(dim, generator=generator)
    found = rms_norm_cpu(x, weight, 1e-5, level)
    expected = rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_without_compiled_code_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 20), torch.randn(20)
    compiled = rms_norm(x, weight, 1e-6)
    monkeypatch.setattr(native, "module", None)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), compiled, rtol=1e-5, atol=1e-6)
