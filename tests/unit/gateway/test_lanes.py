"""How many long texts are worked on at once."""

import asyncio
import threading
import time

import pytest

from paceline.gateway import lanes
from paceline.gateway.lanes import Lanes


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (2, 1), (6, 3), (64, 4)])
async def test_long_texts_take_half_the_cores_that_the_quota_gives(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_threads: int
) -> None:
    monkeypatch.setattr(lanes, "usable_cores", lambda: num_cores)
    both = Lanes()

    def work() -> str:
        time.sleep(0.01)
        return threading.current_thread().name

    try:
        names = await asyncio.gather(*(both.long(work) for _ in range(12)))
    finally:
        both.close()
    assert len(set(names)) == num_threads
