"""When bursts may begin, beside a batch that tells of its steps."""

import threading
import time

import pytest

from paceline.kv_transfer import copy_pace
from paceline.kv_transfer.copy_pace import CopyPace


def unknown_batch(pace: CopyPace) -> None:
    """A burst, and a step that it fell into: what a quiet one takes is not known."""
    pace.burst(lambda: 0.0)
    pace.step_ended(0.05, 8)


def test_a_burst_waits_until_a_step_was_quiet() -> None:
    pace = CopyPace(is_busy=lambda: True)
    unknown_batch(pace)
    begun = threading.Event()

    def copy() -> float:
        begun.set()
        return 0.0

    thread = threading.Thread(target=pace.burst, args=(copy,))
    thread.start()
    assert not begun.wait(0.05)
    pace.step_ended(0.001, 8)
    assert begun.wait(5)
    thread.join()


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_batch_that_has_ended_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    hold_s = 0.05 if is_busy else 5.0
    monkeypatch.setattr(copy_pace, "_MAX_HOLD_S", hold_s)
    pace = CopyPace(is_busy=lambda: is_busy)
    unknown_batch(pace)
    started = time.monotonic()
    pace.burst(lambda: 0.0)
    waited = time.monotonic() - started
    assert (waited >= hold_s) is is_busy
    for _ in range(100):
        pace.burst(lambda: 0.0)
    assert time.monotonic() - started - waited < 3, "each waited again"


def test_a_burst_that_something_held_up_does_not_hold_up_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_pace, "_MAX_PAUSE_S", 0.01)
    pace = CopyPace()
    pace.burst(lambda: 1000.0)
    started = time.monotonic()
    pace.burst(lambda: 0.0)
    assert time.monotonic() - started < 5


def test_a_burst_that_fails_leaves_the_turn_to_the_next() -> None:
    pace = CopyPace()
    with pytest.raises(ZeroDivisionError):
        pace.burst(lambda: 1 / 0)
    num_bursts = 0

    def copy() -> float:
        nonlocal num_bursts
        num_bursts += 1
        return 0.0

    pace.burst(copy)
    assert num_bursts == 1
