"""Steps begin at intervals while requests wait for KV of a device that another process shares."""

import time

import pytest

from paceline.worker.device_turns import INTERVAL_S, DeviceTurns


def seconds_of_steps(turns: DeviceTurns, num_steps: int = 4) -> float:
    """From the first to the last, which take no time themselves."""
    turns.wait()
    started = time.monotonic()
    for _ in range(num_steps - 1):
        turns.wait()
    return time.monotonic() - started


def test_steps_leave_room_while_kv_is_awaited() -> None:
    turns = DeviceTurns(lambda: True, lambda: True, itl_target_s=0.0)
    assert turns.gives_way()
    assert seconds_of_steps(turns) >= 3 * INTERVAL_S * 0.99


@pytest.mark.parametrize(("is_shared", "awaits_kv"), [(False, True), (True, False)])
def test_else_they_follow_each_other(is_shared: bool, awaits_kv: bool) -> None:
    turns = DeviceTurns(lambda: is_shared, lambda: awaits_kv, itl_target_s=0.0)
    assert not turns.gives_way()
    assert seconds_of_steps(turns) < INTERVAL_S


def test_a_target_for_the_latency_between_tokens_is_kept() -> None:
    turns = DeviceTurns(lambda: True, lambda: True, itl_target_s=0.01)
    assert 0.03 * 0.99 <= seconds_of_steps(turns) < 2 * INTERVAL_S


def test_a_long_step_waits_for_nothing() -> None:
    turns = DeviceTurns(lambda: True, lambda: True, itl_target_s=0.01)
    turns.wait()
    time.sleep(0.02)
    started = time.monotonic()
    turns.wait()
    assert time.monotonic() - started < 0.008
