"""A choice of many is the only one of another seed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.seeds import seed_of_choice
from paceline.engine.noise import noise_keys

seeds = st.integers(0, 2**64 - 1)


def keys(seed: int, choice: int) -> list[int]:
    position = torch.arange(3)
    signed = torch.full((3,), seed - (seed >> 63 << 64))
    found: list[int] = noise_keys(signed, torch.full((3,), choice), position).tolist()
    return found


@given(seeds, st.integers(0, 127))
def test_the_noise_of_a_choice_is_that_of_the_first_with_its_seed(seed: int, choice: int) -> None:
    assert keys(seed, choice) == keys(seed_of_choice(seed, choice), 0)


@given(seeds)
def test_the_first_choice_has_the_seed_itself(seed: int) -> None:
    assert seed_of_choice(seed, 0) == seed
    assert len({seed_of_choice(seed, choice) for choice in range(8)}) == 8
