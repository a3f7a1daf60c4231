"""Times of prompts: learned from those that had nobody before them, compared between workers."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.router.pace import MIN_SEEN, PromptPace, costs, mean_pace


def _seconds(num_new: int, num_cached: int, token_s: float, pair_s: float) -> float:
    return num_new * token_s + pair_s * num_new * (num_cached + num_new / 2)


def _learned(
    token_s: float = 2e-5, pair_s: float = 1e-9, count: int = 60, noise: float = 0.0, seed: int = 0
) -> PromptPace:
    chance, pace = random.Random(seed), PromptPace()
    for _ in range(count):
        num_new, num_cached = chance.randrange(100, 60_000), chance.choice([0, 0, 5000, 40_000])
        seconds = _seconds(num_new, num_cached, token_s, pair_s)
        pace.note(num_new, num_cached, seconds * chance.uniform(1 - noise, 1 + noise))
    return pace


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(0, 1e-7), st.integers(0, 1000))
def test_tokens_and_pairs_are_told_apart(token_s: float, pair_s: float, seed: int) -> None:
    pace = _learned(token_s, pair_s, seed=seed)
    for num_new, num_cached in ((500, 0), (8000, 50_000), (100_000, 0)):
        expected = _seconds(num_new, num_cached, token_s, pair_s)
        assert pace.seconds(num_new, num_cached) == pytest.approx(expected, rel=0.01)


def test_noise_of_a_tenth_is_averaged_out() -> None:
    pace = _learned(noise=0.1, count=200)
    for num_new in (2000, 20_000, 100_000):
        expected = _seconds(num_new, 0, 2e-5, 1e-9)
        assert pace.seconds(num_new, 0) == pytest.approx(expected, rel=0.06)


def test_prompts_of_one_length_give_a_time_a_token() -> None:
    pace = PromptPace()
    for _ in range(MIN_SEEN):
        pace.note(1000, 0, 0.05)
    assert pace.seconds(2000, 0) == pytest.approx(0.1) and pace.pair_s == 0


def test_nothing_is_said_before_enough_was_seen() -> None:
    pace = PromptPace()
    for _ in range(MIN_SEEN - 1):
        pace.note(1000, 0, 0.05)
        pace.note(8, 1000, 0.05)  # a step's time
    assert not pace.is_known and pace.seconds(1000, 0) == 0
    pace.note(1000, 0, 0.05)
    assert pace.is_known and pace.seconds(1000, 0) > 0


def test_what_the_worker_says_holds_until_enough_was_seen() -> None:
    pace = PromptPace()
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        pace.tell(wrong)
    assert not pace.is_known
    pace.tell(1e-4)
    assert pace.is_known and not pace.is_learned and pace.seconds(1000, 5000) == pytest.approx(0.1)
    for _ in range(MIN_SEEN):
        pace.note(1000, 0, 0.05)
    pace.tell(1e-4)
    assert pace.seconds(1000, 0) == pytest.approx(0.05)


def test_a_worker_that_only_tells_is_taken_for_one_like_the_others() -> None:
    learned, told = _learned(2e-5), PromptPace()
    told.tell(9e-5)
    assert mean_pace([learned, told]).usual_token_s == learned.usual_token_s
    assert costs(told, learned) == costs(learned, learned)
    assert mean_pace([told]).token_s == 9e-5


def test_a_worker_that_becomes_slower_is_found_to_be() -> None:
    pace = _learned(2e-5)
    chance = random.Random(1)
    for _ in range(150):
        num_new = chance.randrange(100, 20_000)
        pace.note(num_new, 0, _seconds(num_new, 0, 6e-5, 1e-9))
    assert pace.usual_token_s == pytest.approx(6e-5, rel=0.15)


def test_neither_figure_falls_below_nothing() -> None:
    pace = PromptPace()
    for num_new, seconds in ((100, 1.0), (1000, 1.0), (10_000, 1.1), (20_000, 1.2)):
        pace.note(num_new, 0, seconds)
    assert pace.token_s > 0 and pace.pair_s == 0


def test_costs_tell_slow_workers_from_those_that_are_alike() -> None:
    usual, alike, slow = _learned(2e-5), _learned(2.1e-5), _learned(6e-5, 3e-9)
    mean = mean_pace([usual, alike])
    assert costs(usual, mean) == costs(alike, mean) == costs(PromptPace(), mean)
    token, pair = costs(usual, mean)
    assert token + pair * 2048 == pytest.approx(1, rel=0.02), "of a usual prompt"
    slow_token, slow_pair = costs(slow, mean)
    assert slow_token / token == pytest.approx(3, rel=0.1)
    assert slow_pair / pair == pytest.approx(3, rel=0.2)
