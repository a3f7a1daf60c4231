"""Bounds by Triton's kernel against the definition, and against the CPU on whole vocabularies."""

import pytest
import torch

from paceline.kernels.token_filter import Filters, filter_bounds_torch
from tests.unit.kernels.test_token_filter import (
    SETTINGS,
    by_definition,
    filters,
    kept_ids,
    logits_of,
)

gpu = pytest.importorskip("paceline.kernels.gpu.token_filter")
INF, NAN = float("inf"), float("nan")
EACH = Filters(*(torch.tensor(column) for column in zip(*SETTINGS, strict=True)))


def kept(
    device: torch.device, x: torch.Tensor, temperature: float, chosen: Filters
) -> list[set[int]]:
    columns = (chosen.min_p, chosen.top_k, chosen.top_p, chosen.typical_p)
    on_device = Filters(*(column.to(device) for column in columns))
    best = x.amax(dim=1).to(device)
    bounds = gpu.filter_bounds(x.to(device), best, torch.full_like(best, temperature), on_device)
    return kept_ids(x, (bounds[0].cpu(), bounds[1].cpu()))


def few_fit(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Rows of some hundred numbers take all the ways of longer ones."""
    monkeypatch.setattr(gpu, "_BLOCK", block)
    monkeypatch.setattr(gpu, "_FEW_BLOCK", min(block, 32))
    monkeypatch.setattr(gpu, "_NARROW_BLOCK", 32)


@pytest.mark.parametrize("block", [16, 128, 4096])
@pytest.mark.parametrize("spread", [0.1, 2.0, 30.0])
@pytest.mark.parametrize("size", [1, 7, 333, 340])
def test_keeps_what_the_definition_keeps(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, size: int, spread: float, block: int
) -> None:
    few_fit(monkeypatch, block)
    x = logits_of(len(SETTINGS), size + 4, spread)[:, :size]
    x[0, 0] = 1.0
    expected = [
        by_definition(row.tolist(), 0.8, setting) for row, setting in zip(x, SETTINGS, strict=True)
    ]
    assert kept(device, x, 0.8, EACH) == expected


@pytest.mark.parametrize("setting", [(0.0, 50, 0.9, 1.0), *SETTINGS[4:10]])
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_equals_sorting_on_whole_vocabularies(
    device: torch.device, spread: float, setting: tuple[float, int, float, float]
) -> None:
    """But for a token whose mass is less than what float32 rounds off."""
    x = logits_of(2, 30_011, spread)
    chosen, best = filters(2, setting), x.amax(dim=1)
    expected = kept_ids(x, filter_bounds_torch(x, best, torch.ones(2), chosen))
    for ids, wanted in zip(kept(device, x, 1.0, chosen), expected, strict=True):
        assert len(ids ^ wanted) <= 2


@pytest.mark.parametrize("block", [16, 4096])
def test_equal_logits_stay_together(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    few_fit(monkeypatch, block)
    x = torch.zeros(1, 500)
    x[0, 100:150] = 2.0
    x[0, 300] = -INF
    for setting in [(0.0, 3, 1.0, 1.0), (0.0, 0, 1e-6, 1.0), (0.5, 0, 1.0, 1.0)]:
        assert kept(device, x, 1.0, filters(1, setting)) == [set(range(100, 150))]
    chosen = filters(1, (0.0, 75, 1.0, 1.0))
    assert kept(device, x, 1.0, chosen) == [set(range(500)) - {300}]


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6, 1e30])
def test_extreme_temperatures_keep_the_best(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    few_fit(monkeypatch, 64)
    x = logits_of(len(SETTINGS), 333, 2.0)
    x[1, 5] = -3e38  # far from all others: numbers between are tried, then keys
    found = kept(device, x, temperature, EACH)
    for ids, row, (_, _, _, typical_p) in zip(found, x, SETTINGS, strict=True):
        assert int(row.argmax()) in ids or (typical_p < 1 and temperature > 1)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_unusable_rows_spoil_no_others(device: torch.device, value: float) -> None:
    x = logits_of(3, 2000, 2.0)
    x[1] = value if value < 0 else x[1].index_fill(0, torch.tensor([77]), value)
    setting = (0.05, 60, 0.9, 0.8)
    expected = [by_definition(row.tolist(), 1.0, setting) for row in x[[0, 2]]]
    found = kept(device, x, 1.0, filters(3, setting))
    assert [found[0], found[2]] == expected


def test_twice_the_same_bounds(device: torch.device) -> None:
    """Whatever the order in which numbers are collected."""
    x = logits_of(4, 30_011, 1.0)
    chosen = filters(4, (0.0, 0, 0.3, 1.0))
    assert kept(device, x, 0.5, chosen) == kept(device, x, 0.5, chosen)
