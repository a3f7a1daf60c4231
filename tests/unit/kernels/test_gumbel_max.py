"""Draws: the compiled one against all noise in float64, at every level of instructions."""

import pytest
import torch

from paceline.kernels import native
from paceline.kernels.gumbel_max import gumbel, gumbel_max, gumbel_max_cpu, gumbel_max_torch

assert native.module is not None
LEVELS = range(native.module.BEST_LEVEL + 1)
Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def columns(x: torch.Tensor, temperature: float = 1.0) -> Columns:
    """best, temperature, low, high, keys: everything may come."""
    num = len(x)
    keys = torch.randint(-(2**63), 2**63 - 1, (num,), generator=torch.Generator().manual_seed(num))
    low, high = torch.full((num,), -3e38), torch.full((num,), torch.inf)
    return x.max(dim=1).values, torch.full((num,), temperature), low, high, keys


def logits_of(num_rows: int, size: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size)) * spread


def by_definition(x: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
    best, temperature, low, high, keys = arguments
    scaled = (x.double() - best.double()[:, None]) / temperature.double()[:, None]
    scores = scaled + gumbel(keys[:, None], torch.arange(x.shape[1]))
    outside = (x < low[:, None]) | (x > high[:, None])
    return scores.masked_fill_(outside, -torch.inf).argmax(dim=1)


@pytest.mark.parametrize("temperature", [0.01, 0.7, 30.0])
@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 50.0])
@pytest.mark.parametrize("size", [1, 9, 40, 30_011])
def test_equals_all_noise_in_float64(size: int, spread: float, temperature: float) -> None:
    x = logits_of(12, size, spread)
    arguments = columns(x, temperature)
    expected = by_definition(x, *arguments)
    assert torch.equal(gumbel_max_torch(x, *arguments), expected)
    for level in LEVELS:
        assert torch.equal(gumbel_max_cpu(x, *arguments, level), expected)


@pytest.mark.parametrize("level", [*LEVELS, None])
def test_only_numbers_between_the_bounds_come(level: int | None) -> None:
    x = logits_of(200, 501)
    best, temperature, low, high, keys = columns(x, 2.0)
    low = low.fill_(-1.0)
    high[:100] = 0.5  # the best may lie beyond
    arguments = (best, temperature, low, high, keys)
    draw = gumbel_max_torch if level is None else gumbel_max_cpu
    ids = draw(x, *arguments) if level is None else gumbel_max_cpu(x, *arguments, level)
    assert torch.equal(ids, by_definition(x, *arguments))
    drawn = x.gather(1, ids[:, None])[:, 0]
    assert bool(((drawn >= low) & (drawn <= high)).all())


def test_rare_noise_beats_a_far_better_logit() -> None:
    """The highest noise of 2^20 tokens is near 14: passing over all that is far below the best
    would miss it."""
    x = torch.full((4, 1 << 20), -9.0)
    x[:, 5] = 0.0
    arguments = columns(x)
    expected = by_definition(x, *arguments)
    assert (expected != 5).any()
    for level in LEVELS:
        assert torch.equal(gumbel_max_cpu(x, *arguments, level), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_unusable_rows_give_some_id_and_spoil_no_others(value: float) -> None:
    x = logits_of(3, 1000)
    arguments = columns(x)
    expected = gumbel_max(x, *arguments)
    x[1] = value
    arguments[0][1] = value
    for draw in (gumbel_max_torch, gumbel_max_cpu):
        ids = draw(x, *arguments)
        assert torch.equal(ids[[0, 2]], expected[[0, 2]])
        assert 0 <= ids[1] < 1000


def test_no_rows() -> None:
    x = torch.empty(0, 50)
    empty = torch.empty(0)
    keys = torch.empty(0, dtype=torch.int64)
    assert gumbel_max(x, empty, empty, empty, empty, keys).shape == (0,)


def test_wrong_sizes_are_refused() -> None:
    x = logits_of(2, 100)
    best, temperature, low, high, keys = columns(x)
    with pytest.raises(ValueError, match="8 bytes for 2 rows, 8 a row are needed"):
        gumbel_max_cpu(x, best, temperature, low, high, keys[:1])
