"""The highest number of each row against torch, at every level of instructions."""

import pytest
import torch

from paceline.kernels import native
from paceline.kernels.row_max import row_max, row_max_cpu

assert native.module is not None
LEVELS = range(native.module.BEST_LEVEL + 1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 17), (40, 1024), (5, 1025), (9, 5000)])
def test_equals_torch(rows: int, size: int, level: int) -> None:
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(size))
    values, places = row_max_cpu(x, level)
    expected = x.max(dim=1)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


@pytest.mark.parametrize("level", LEVELS)
def test_equal_numbers_give_the_first_place(level: int) -> None:
    x = torch.zeros(3, 5000)
    x[1, [4321, 4322, 4999]] = 1
    x[2] = -torch.inf
    values, places = row_max_cpu(x, level)
    assert values.tolist() == [0, 1, -torch.inf]
    assert places.tolist() == [0, 4321, 0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", [0, 5, 1029, 4999])
def test_a_row_with_nan_says_so(place: int, level: int) -> None:
    x = torch.randn(2, 5000)
    x[1, place] = torch.nan
    values, places = row_max_cpu(x, level)
    assert values.isnan().tolist() == [False, True]
    assert places[1] == place


def test_other_types_go_to_torch() -> None:
    x = torch.randn(3, 20).bfloat16()
    assert torch.equal(row_max(x)[1], x.max(dim=1).indices)
