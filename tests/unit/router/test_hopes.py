"""What prompts cost streams that hope for a time between tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.router.hopes import DOUBT_S, RECOVERY_S, Hopes, chance_of_late

NOW = 1000.0
ITL_S, STEP_S = 0.04, 0.08  # a second beside prompts costs half a second of slack


STEP = 7


def _hopes(*slacks: float, itl_s: float = ITL_S) -> Hopes:
    """Streams that have so much at that step, now."""
    hopes = Hopes()
    for slack_s in slacks:
        hopes.add(itl_s, NOW + slack_s - itl_s * STEP)
    return hopes


def _misses(
    *slacks: float,
    ahead_s: float = 0.0,
    prompt_s: float = 1.0,
    step_s: float = STEP_S,
    itl_s: float = ITL_S,
) -> float:
    return round(_hopes(*slacks, itl_s=itl_s).misses(STEP, NOW, step_s, ahead_s, prompt_s), 9)


def test_who_has_slack_enough_loses_nothing() -> None:
    assert _misses() == 0
    assert _misses(0.5, 3.0) == 0
    assert _misses(0.5, ahead_s=0.5) == pytest.approx(0.25 / RECOVERY_S)


def test_who_has_none_is_lost_the_more_the_longer_the_prompt() -> None:
    assert _misses(0.0) == pytest.approx(0.5 / RECOVERY_S)
    assert _misses(0.0, prompt_s=2.0) == pytest.approx(1.0 / RECOVERY_S)
    assert _misses(0.0, prompt_s=1000.0) == 1
    assert _misses(0.0, 0.2, 0.5) == pytest.approx((0.5 + 0.3) / RECOVERY_S)


def test_what_is_lost_already_is_not_counted_again() -> None:
    assert _misses(-RECOVERY_S) == 0
    assert _misses(0.0, ahead_s=2 * RECOVERY_S) == 0
    assert _misses(-RECOVERY_S + 0.1, prompt_s=100.0) == pytest.approx(0.1 / RECOVERY_S)


def test_steps_as_short_as_what_is_hoped_for_cost_nothing() -> None:
    assert _misses(0.0, prompt_s=100.0, step_s=ITL_S) == 0
    assert _misses(0.0, prompt_s=100.0, step_s=0.01) == 0


def test_who_hopes_for_more_than_any_step_brings_hopes_for_nothing() -> None:
    """1 ms from token to token would keep every prompt away from its worker."""
    for itl_s, missed in ((0.001, 0.0), (0.0099, 0.0), (0.01, 1.0)):
        found = _hopes(-0.01, itl_s=itl_s).misses(STEP, NOW, STEP_S, 0.0, 100.0, least_s=0.01)
        assert found == pytest.approx(missed, abs=0.01), itl_s


def test_slack_is_what_steps_so_far_could_have_taken() -> None:
    """Ten steps of 40 ms in 0.1 s leave 0.3 s: a prompt of 0.6 s takes them, one of 1.6 s more."""
    hopes = _hopes(0.0)
    assert hopes.misses(STEP + 10, NOW + 0.1, STEP_S, 0.0, 0.599) == 0
    found = hopes.misses(STEP + 10, NOW + 0.1, STEP_S, 0.0, 1.6)
    assert found == pytest.approx(0.5 / RECOVERY_S)


def test_who_waits_for_a_first_token_has_no_slack_whatever_the_time() -> None:
    hopes = Hopes()
    hopes.add(ITL_S, None)
    hopes.add(ITL_S, None)
    assert hopes.misses(99, 5.0, STEP_S, 0.0, 1.0) == pytest.approx(2 * 0.5 / RECOVERY_S)
    hopes.remove(ITL_S, None)
    assert hopes.misses(99, 5.0, STEP_S, 0.0, 1.0) == pytest.approx(0.5 / RECOVERY_S)


def _one_by_one(
    streams: list[tuple[float, float | None]], ahead_s: float, prompt_s: float
) -> float:
    """The rule, for each stream: (what it hopes for, slack or None)."""
    missed = 0.0
    for itl_s, slack_s in streams:
        if itl_s < STEP_S:
            before_s = (1 - itl_s / STEP_S) * ahead_s - (slack_s or 0.0)
            after_s = before_s + (1 - itl_s / STEP_S) * prompt_s
            shares = [min(1.0, max(0.0, below / RECOVERY_S)) for below in (after_s, before_s)]
            missed += shares[0] - shares[1]
    return missed


_streams = st.tuples(st.sampled_from([0.01, 0.02, ITL_S, 0.2]), st.none() | st.floats(-8, 8))


@given(st.lists(_streams, max_size=30), st.integers(0, 30), st.floats(0, 9), st.floats(0, 9))
def test_all_are_counted_as_if_one_by_one_also_when_some_have_ended(
    streams: list[tuple[float, float | None]], num_ended: int, ahead_s: float, prompt_s: float
) -> None:
    hopes = Hopes()
    known = [(i, None if s is None else NOW + s - i * STEP) for i, s in streams]
    for itl_s, origin in known:
        hopes.add(itl_s, origin)
    for itl_s, origin in known[:num_ended]:
        hopes.remove(itl_s, origin)
    found = hopes.misses(STEP, NOW, STEP_S, ahead_s, prompt_s)
    assert found == pytest.approx(_one_by_one(streams[num_ended:], ahead_s, prompt_s), abs=1e-6)
    for itl_s, origin in known[num_ended:]:
        hopes.remove(itl_s, origin)
    assert not hopes._alike


@given(
    st.lists(st.floats(-10, 10), max_size=10), st.floats(0, 10), st.floats(0, 10), st.floats(0, 10)
)
def test_a_longer_prompt_never_costs_less(
    slacks: list[float], ahead_s: float, prompt_s: float, more_s: float
) -> None:
    shorter = _misses(*slacks, ahead_s=ahead_s, prompt_s=prompt_s)
    longer = _misses(*slacks, ahead_s=ahead_s, prompt_s=prompt_s + more_s)
    assert 0 <= shorter <= longer + 1e-9 and longer <= len(slacks)


def test_a_first_token_is_late_as_likely_as_not_when_it_is_predicted_in_time_just_so() -> None:
    assert chance_of_late(0.0) == 0.5
    assert chance_of_late(DOUBT_S) == chance_of_late(float("inf")) == 0
    assert chance_of_late(-DOUBT_S) == 1


def test_the_doubt_of_a_first_token_is_no_longer_than_the_time_it_is_hoped_for_in() -> None:
    assert [chance_of_late(left, 0.1) for left in (0.1, 0.0, -0.1, -0.2)] == [0, 0.5, 1, 1]
