"""The highest number of each row against torch, and what a step has drawn as the host gets it."""

import pytest
import torch

gpu = pytest.importorskip("paceline.kernels.gpu.row_max")
INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("num_rows", "size"), [(1, 1), (3, 17), (2, 4096), (5, 9001), (2, 1 << 20)]
)
def test_equals_torch(device: torch.device, num_rows: int, size: int) -> None:
    x = torch.randn(num_rows, size + 3).to(device)[:, :size]
    x[-1, size // 3] = x[-1, size // 2] = 9.0
    values, places = gpu.row_max(x)
    expected = x.max(dim=1)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


@pytest.mark.parametrize(
    "row",
    [
        [-INF, -INF, -INF],
        [-1.0, -0.0, 0.0],
        [-3.0, -2.0, -5.0],
        [INF, 1.0, INF],
        [1.0, NAN, INF, NAN],
        [1.0, -NAN],
    ],
)
def test_special_numbers(device: torch.device, row: list[float]) -> None:
    x = torch.tensor([row]).to(device)
    values, places = gpu.row_max(x)
    expected = x.max(dim=1)
    assert torch.equal(places, expected.indices)
    torch.testing.assert_close(values, expected.values, rtol=0, atol=0, equal_nan=True)


def test_draws_reach_the_host(device: torch.device) -> None:
    from paceline.kernels.gpu.transfer import draws_to_host

    token_ids = torch.randint(0, 1 << 40, (300,)).to(device)
    best = torch.randn(300).to(device)
    host_ids, host_best = draws_to_host(token_ids, best)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(host_ids, token_ids.cpu()) and torch.equal(host_best, best.cpu())
