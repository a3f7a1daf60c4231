"""Calls that wait for their message, at the bound and at the end of their time."""

import asyncio
import time
from typing import Any

import pytest

from paceline.core.errors import InvalidRequest
from paceline.rpc import open_calls
from paceline.rpc.open_calls import OpenCalls


class SilentContext:
    """A call whose message comes when `is_sent` is set."""

    def __init__(self) -> None:
        self.is_sent = asyncio.Event()

    async def read(self) -> bytes:
        await self.is_sent.wait()
        return b"message"


@pytest.mark.asyncio
async def test_a_call_that_comes_as_the_first_in_line_runs_out_of_time_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_calls, "MAX_WAITING_CALLS", 1)
    loop, calls = asyncio.get_running_loop(), OpenCalls(0.02)
    contexts: list[Any] = [SilentContext(), SilentContext()]
    has_come = loop.create_future()

    async def newcomer() -> bytes:
        await has_come
        contexts[1].is_sent.set()
        return await calls.first_message(contexts[1])

    second = asyncio.create_task(newcomer())
    first = asyncio.create_task(calls.first_message(contexts[0]))
    await asyncio.sleep(0)
    loop.call_later(0.019, has_come.set_result, None)
    time.sleep(0.03)  # noqa: ASYNC251 - the loop is late: both timers are due in one round
    assert await second == b"message"
    with pytest.raises(InvalidRequest, match="did not arrive"):
        await first
