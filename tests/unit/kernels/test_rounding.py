"""Weights rounded to 8 and 4 bits lie within half a step of what they were."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.kernels.quantized import GROUP, Quantized
from paceline.kernels.rounding import round_to_4, round_to_8

sizes = st.integers(1, 100)


def weight(depth: int, columns: int, seed: int) -> torch.Tensor:
    """Columns of very different size, around very different means."""
    chance = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, columns)
    means = torch.randn(columns, generator=chance) * 3
    return (torch.randn(depth, columns, generator=chance) + means) * sizes


def half_steps(quantized: Quantized) -> torch.Tensor:
    """[in, out], of each number, with the rounding of scale and zero to 16 bits."""
    steps = quantized.scales.float() * 0.51
    return steps.repeat_interleave(GROUP, dim=0)[: quantized.depth]


@settings(deadline=None, max_examples=40)
@given(sizes, sizes, st.integers(0, 1000))
@example(1, 1, 177)  # so small that the 16 bits of its scale are few
def test_within_half_a_step(depth: int, columns: int, seed: int) -> None:
    values = weight(depth, columns, seed)
    for rounded in (round_to_8(values), round_to_4(values)):
        error = (rounded.dequantized() - values).abs()
        slack = values.abs().amax() * 1e-7 + values.abs() * 2.0**-10
        assert (error <= half_steps(rounded) + slack).all()


def test_many_columns_are_rounded_like_few() -> None:
    values = weight(40, 4100, 1)
    whole, end = round_to_4(values), round_to_4(values[:, 4090:].clone())
    assert torch.equal(whole.dequantized()[:, 4090:], end.dequantized())


@pytest.mark.parametrize("value", [0.0, 1e-9, 2e-5, 0.37, -0.37, 1000.0])
def test_groups_of_one_value(value: float) -> None:
    values = torch.full((64, 3), value)
    for rounded in (round_to_8(values), round_to_4(values)):
        found = rounded.dequantized()
        torch.testing.assert_close(found, values, rtol=2.0**-8, atol=2.0**-24 * 127)


def test_numbers_of_four_bits_are_found_again() -> None:
    """A weight that lies on a grid of 16 steps, as in a Q4_1 file, loses next to nothing."""
    chance = torch.Generator().manual_seed(4)
    steps = torch.rand(2, 40, generator=chance).half().float()
    lowest = -torch.rand(2, 40, generator=chance).half().float() * 8 * steps
    numbers = torch.randint(0, 16, (2, GROUP, 40), generator=chance)
    numbers[:, 0], numbers[:, 1] = 0, 15
    values = (numbers * steps[:, None] + lowest[:, None]).flatten(0, 1)
    rounded = round_to_4(values)
    assert torch.equal(rounded.numbers, numbers.flatten(0, 1).byte())
    torch.testing.assert_close(rounded.dequantized(), values, rtol=2.0**-8, atol=2e-3)
