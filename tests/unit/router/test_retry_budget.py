"""Retries are a share of what succeeds."""

from paceline.router.retry_budget import LEAST, PER_S, SHARE, RetryBudget


def taken(budget: RetryBudget, now: float, num_in_flight: int, *, has_output: bool) -> int:
    return sum(budget.take(now, num_in_flight, has_output=has_output) for _ in range(10_000))


def test_what_was_in_flight_may_be_tried_again_once_and_streams_go_last() -> None:
    budget = RetryBudget(0.0)
    assert taken(budget, 0.0, 400, has_output=False) == 200
    assert taken(budget, 0.0, 400, has_output=True) == 200
    assert taken(RetryBudget(0.0), 0.0, 1, has_output=True) == LEAST


def test_successes_and_time_earn_more() -> None:
    budget = RetryBudget(0.0)
    taken(budget, 0.0, 0, has_output=True)
    for _ in range(100):
        budget.earn()
    assert taken(budget, 0.0, 0, has_output=True) == round(100 * SHARE)
    assert taken(budget, 5.0, 0, has_output=True) == 5 * PER_S
    assert taken(budget, 1e6, 0, has_output=True) == LEAST, "no more than that is saved"
