"""Draws by Triton's kernels against the reference, which judges in float64."""

import pytest
import torch

from paceline.kernels.gumbel_max import gumbel_max_torch

gpu = pytest.importorskip("paceline.kernels.gpu.gumbel_max")
INF, NAN = float("inf"), float("nan")
LOWEST = torch.finfo(torch.float32).min


def draws(
    device: torch.device,
    x: torch.Tensor,
    temperature: float,
    low: float = LOWEST,
    high: float = INF,
) -> tuple[list[int], list[int]]:
    """Of the kernel, of the reference."""
    num_rows = len(x)
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (num_rows,))
    columns = [x.amax(dim=1), *(torch.full((num_rows,), n) for n in (temperature, low, high)), keys]
    on_device = [column.to(device) for column in columns]
    ids = gpu.gumbel_max(x.to(device), *on_device)
    return ids.tolist(), gumbel_max_torch(x, *columns).tolist()


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (7, 17), (6, 4096), (3, 9001)])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 30.0])
def test_equals_the_reference(
    device: torch.device, num_rows: int, size: int, temperature: float
) -> None:
    found, expected = draws(device, 4 * torch.randn(num_rows, size + 3)[:, :size], temperature)
    assert found == expected


def test_rows_longer_than_the_parts_of_one_step(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_MAX_PARTS", 2)
    found, expected = draws(device, torch.randn(3, 20000), 1.0)
    assert found == expected


def test_only_what_lies_between_the_bounds_is_drawn(device: torch.device) -> None:
    x = torch.randn(6, 5000)
    found, expected = draws(device, x, 5.0, low=0.5, high=0.75)
    assert found == expected
    drawn = x[torch.arange(6), torch.tensor(found)]
    assert (drawn >= 0.5).all() and (drawn <= 0.75).all()


def test_equal_scores_go_to_the_same_token_as_on_the_cpu(device: torch.device) -> None:
    found, expected = draws(device, torch.zeros(30, 64), 1.0)
    assert found == expected and len(set(found)) > 10


def test_many_draws_from_few_tokens(device: torch.device) -> None:
    """Some of them close: rough scores that were too rough would leave out the best."""
    num_rows = 20_000 if device.type == "cuda" else 50
    found, expected = draws(device, torch.randn(num_rows, 16), 1.0)
    assert found == expected


@pytest.mark.parametrize("row", [[-INF, -INF, -INF], [NAN, NAN], [1.0, -INF, NAN, 0.5]])
def test_of_odd_rows_it_draws_some_token(device: torch.device, row: list[float]) -> None:
    (found,), _ = draws(device, torch.tensor([row]), 1.0)
    assert 0 <= found < len(row)
