"""Numbers of 16 bits as float32: every value as torch gives it."""

import pytest
import torch

gpu = pytest.importorskip("paceline.kernels.gpu.widen")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (3, 5000), (2, 4096)])
def test_equals_torch(device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = (100 * torch.randn(shape)).to(device, dtype)
    assert torch.equal(gpu.widened(x), x.float())
    assert gpu.widened(x).dtype == torch.float32


def test_special_numbers(device: torch.device) -> None:
    inf = float("inf")
    x = torch.tensor([-0.0, inf, -inf, 6e-8, float("nan")], device=device).half()
    torch.testing.assert_close(gpu.widened(x), x.float(), rtol=0, atol=0, equal_nan=True)
