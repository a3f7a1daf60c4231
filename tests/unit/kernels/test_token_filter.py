"""min_p, top_k, top_p and typical_p against their definitions, one row and one token at a time."""

import math

import pytest
import torch

from paceline.kernels import native
from paceline.kernels.token_filter import (
    Filters,
    filter_bounds,
    filter_bounds_cpu,
    filter_bounds_torch,
)

assert native.module is not None
LEVELS = range(native.module.BEST_LEVEL + 1)
OFF = (0.0, 0, 1.0, 1.0)  # min_p, top_k, top_p, typical_p
SETTINGS = [
    OFF,
    (0.1, 0, 1.0, 1.0),
    (1.0, 0, 1.0, 1.0),
    (0.0, 1, 1.0, 1.0),
    (0.0, 40, 1.0, 1.0),
    (0.0, 10**6, 1.0, 1.0),
    (0.0, 0, 0.9, 1.0),
    (0.0, 0, 1e-9, 1.0),
    (0.0, 0, 0.999, 1.0),
    (0.0, 0, 1.0, 0.2),
    (0.0, 0, 1.0, 0.95),
    (0.05, 60, 0.9, 0.8),
    (0.01, 500, 0.97, 0.5),
]


def filters(num_rows: int, setting: tuple[float, int, float, float]) -> Filters:
    min_p, top_k, top_p, typical_p = setting
    return Filters(
        torch.full((num_rows,), min_p),
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), typical_p),
    )


def logits_of(num_rows: int, size: int, spread: float) -> torch.Tensor:
    x = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size)) * spread
    x[0, ::7] = -torch.inf
    return x


def shortest(ranked: list[int], mass: dict[int, float], share: float) -> list[int]:
    """The first of `ranked` before which less than `share` of the whole mass lies."""
    whole, before, kept = math.fsum(mass[i] for i in ranked), 0.0, []
    for i in ranked:
        if kept and before >= share * whole:
            break
        kept.append(i)
        before += mass[i]
    return kept


def by_definition(
    row: list[float], temperature: float, setting: tuple[float, int, float, float]
) -> set[int]:
    min_p, top_k, top_p, typical_p = setting
    best = max(row)
    mass = {i: math.exp((x - best) / temperature) for i, x in enumerate(row) if x > -math.inf}
    kept = [i for i in mass if mass[i] >= min_p]
    kept.sort(key=lambda i: -row[i])
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        kept = shortest(kept, mass, top_p)
    if typical_p < 1:
        whole = math.fsum(mass[i] for i in kept)
        surprise = {i: -math.log(mass[i] / whole) for i in kept if mass[i] > 0}
        entropy = math.fsum(mass[i] / whole * surprise[i] for i in surprise)
        kept = shortest(sorted(surprise, key=lambda i: abs(surprise[i] - entropy)), mass, typical_p)
    return set(kept)


def kept_ids(x: torch.Tensor, bounds: tuple[torch.Tensor, torch.Tensor]) -> list[set[int]]:
    low, high = bounds
    kept = (x >= low[:, None]) & (x <= high[:, None])
    return [set(torch.nonzero(row)[:, 0].tolist()) for row in kept]


def all_bounds(
    x: torch.Tensor, temperature: float, chosen: Filters
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    best, temperatures = x.max(dim=1).values, torch.full((len(x),), temperature)
    found = [filter_bounds_cpu(x, best, temperatures, chosen, level) for level in LEVELS]
    return [*found, filter_bounds_torch(x, best, temperatures, chosen)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("spread", [0.1, 2.0, 30.0])
@pytest.mark.parametrize("size", [1, 7, 333])
def test_keeps_what_the_definition_keeps(
    size: int, spread: float, setting: tuple[float, int, float, float]
) -> None:
    x = logits_of(4, size, spread)
    x[0, 0] = 1.0
    expected = [by_definition(row.tolist(), 0.8, setting) for row in x]
    for bounds in all_bounds(x, 0.8, filters(4, setting)):
        assert kept_ids(x, bounds) == expected


@pytest.mark.parametrize("setting", SETTINGS[1:])
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_compiled_code_and_torch_agree_on_whole_vocabularies(
    spread: float, setting: tuple[float, int, float, float]
) -> None:
    """But for a token whose mass is less than what float32 rounds off."""
    x = logits_of(3, 30_011, spread)
    *compiled, reference = (kept_ids(x, b) for b in all_bounds(x, 1.0, filters(3, setting)))
    for found in compiled:
        for ids, wanted in zip(found, reference, strict=True):
            assert len(ids ^ wanted) <= 2


def test_equal_logits_stay_together() -> None:
    x = torch.zeros(1, 5000)
    x[0, 100:200] = 2.0
    x[0, 300] = -torch.inf
    for setting in [(0.0, 3, 1.0, 1.0), (0.0, 0, 1e-6, 1.0), (0.5, 0, 1.0, 1.0)]:
        for bounds in all_bounds(x, 1.0, filters(1, setting)):
            assert kept_ids(x, bounds) == [set(range(100, 200))]
    for bounds in all_bounds(x, 1.0, filters(1, (0.0, 150, 1.0, 1.0))):
        assert kept_ids(x, bounds) == [set(range(5000)) - {300}]


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6])
@pytest.mark.parametrize("setting", SETTINGS[1:])
def test_cold_rows_keep_the_best(
    temperature: float, setting: tuple[float, int, float, float]
) -> None:
    x = logits_of(3, 500, 2.0)
    for bounds in all_bounds(x, temperature, filters(3, setting)):
        best = x.argmax(dim=1).tolist()
        assert all(i in ids for i, ids in zip(best, kept_ids(x, bounds), strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_unusable_rows_spoil_no_others(value: float) -> None:
    x = logits_of(3, 2000, 2.0)
    x[1] = value if value < 0 else x[1].index_fill(0, torch.tensor([77]), value)
    setting = (0.05, 60, 0.9, 0.8)
    expected = [by_definition(row.tolist(), 1.0, setting) for row in x[[0, 2]]]
    for bounds in all_bounds(x, 1.0, filters(3, setting)):
        found = kept_ids(x, bounds)
        assert [found[0], found[2]] == expected


def test_each_row_has_its_own_settings() -> None:
    x = logits_of(len(SETTINGS), 400, 2.0)
    columns = [torch.tensor(column) for column in zip(*SETTINGS, strict=True)]
    temperatures = torch.linspace(0.5, 2.0, len(x))
    bounds = filter_bounds(x, x.max(dim=1).values, temperatures, Filters(*columns))
    for ids, row, temperature, setting in zip(
        kept_ids(x, bounds), x, temperatures, SETTINGS, strict=True
    ):
        assert ids == by_definition(row.tolist(), temperature.item(), setting)


def test_wrong_sizes_are_refused() -> None:
    x = logits_of(4, 100, 1.0)
    best = x.max(dim=1).values
    with pytest.raises(ValueError, match="12 bytes for 4 rows, 4 a row are needed"):
        filter_bounds_cpu(x, best, torch.ones(3), filters(4, OFF))
