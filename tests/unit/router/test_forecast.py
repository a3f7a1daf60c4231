"""How far costs of plans are from the time that they predict."""

import random

import pytest

from paceline.router import forecast
from paceline.router.forecast import Forecast


def errors(made: Forecast, pairs: list[tuple[float, float]], worker: str = "p") -> list[float]:
    found = (made.error(worker, cost, seconds) for cost, seconds in pairs)
    return [error for error in found if error is not None]


def test_a_worker_that_takes_what_costs_say_has_no_error() -> None:
    """A part that is the same for all, such as the launch of a step, is no error."""
    chance = random.Random(3)
    costs = [chance.uniform(10, 4000) for _ in range(50)]
    found = errors(Forecast(), [(cost, 0.02 + 1e-4 * cost) for cost in costs])
    assert len(found) == 50 - forecast.MIN_SEEN
    assert max(found) < 1e-6


def test_an_error_is_a_share_of_what_it_took() -> None:
    made = Forecast()
    errors(made, [(100 * i, 0.01 * i) for i in range(1, 9)])
    assert made.error("p", 1000, 0.2) == pytest.approx(0.5)


def test_a_worker_that_becomes_slow_is_learned_anew() -> None:
    made = Forecast()
    pairs = [(float(100 + i % 7), 0.01) for i in range(100)]
    errors(made, pairs)
    slow = errors(made, [(cost, 0.03) for cost, _ in pairs * 3])
    assert slow[0] == pytest.approx(2 / 3, abs=0.01)
    assert slow[-1] < 0.05


def test_equal_costs_predict_their_mean() -> None:
    found = errors(Forecast(), [(64.0, 0.01)] * 10)
    assert max(found) < 1e-9


def test_what_costs_more_is_never_predicted_to_be_faster() -> None:
    made = Forecast()
    errors(made, [(float(cost), 1 / cost) for cost in range(1, 20)])
    first = made.error("p", 1.0, 0.5)
    second = made.error("p", 1e6, 0.5)
    assert first is not None and second is not None and second < 1


def test_workers_are_apart_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "MAX_WORKERS", 2)
    made = Forecast()
    steady = [(64.0, 0.01)] * 5
    for worker in ("a", "b"):
        errors(made, steady, worker)
    assert made.error("b", 64.0, 0.01) == pytest.approx(0)
    errors(made, steady, "c")  # the one that was used longest ago makes room
    assert made.error("a", 64.0, 0.01) is None
    assert made.error("c", 64.0, 0.01) == pytest.approx(0)


def test_what_is_no_number_is_not_learned() -> None:
    made = Forecast()
    assert errors(made, [(float("nan"), 0.1), (float("inf"), 0.1), (1.0, -0.1)] * 5) == []
    assert made.error("p", 1.0, 0.1) is None
