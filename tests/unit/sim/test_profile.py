"""The profile says what the tables of the card say."""

import pytest

from paceline.sim.profile import H200_LLAMA_8B, H200_TABLE

CARD_STEP_TOKENS = 8192  # of the engine that was measured


@pytest.mark.parametrize(("batch", "length"), H200_TABLE)
def test_decode_steps_are_within_six_percent_of_the_table(batch: int, length: int) -> None:
    _, measured_ms = H200_TABLE[batch, length]
    predicted_s = H200_LLAMA_8B.decode_step_s(batch, batch * (length + 64))
    assert 1000 * predicted_s == pytest.approx(measured_ms, rel=0.06)


@pytest.mark.parametrize(("batch", "length"), H200_TABLE)
def test_prompts_are_within_two_percent_of_the_table(batch: int, length: int) -> None:
    tokens_per_s, _ = H200_TABLE[batch, length]
    num_tokens = batch * length
    num_steps = -(-num_tokens // CARD_STEP_TOKENS)
    one = H200_LLAMA_8B.step_s(num_tokens // num_steps, length / 2, 0, 0)
    assert num_tokens / (num_steps * one) == pytest.approx(tokens_per_s, rel=0.02)


def test_a_cached_prefix_saves_its_tokens_and_not_the_look_at_them() -> None:
    whole, rest = H200_LLAMA_8B.prompt_s(8192), H200_LLAMA_8B.prompt_s(8192, 6144)
    assert H200_LLAMA_8B.prompt_s(2048) < rest < whole / 3
