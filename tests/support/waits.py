"""Waiting for what others bring about: tasks of this process, or other processes."""

import asyncio
import time
from collections.abc import Callable


async def until(holds: Callable[[], object], timeout_s: float = 5.0) -> float:
    """Seconds until `holds()`; other tasks go on meanwhile. Raises TimeoutError."""
    started = time.monotonic()
    while not holds():
        _check(started, timeout_s, holds)
        await asyncio.sleep(0.005)
    return time.monotonic() - started


def wait_for(holds: Callable[[], object], timeout_s: float = 30.0) -> float:
    """The same where there is no event loop."""
    started = time.monotonic()
    while not holds():
        _check(started, timeout_s, holds)
        time.sleep(0.01)
    return time.monotonic() - started


async def wait_beside(holds: Callable[[], object], timeout_s: float) -> float:
    """`wait_for`, in a thread: what takes long to look at holds up no other task."""
    return await asyncio.to_thread(wait_for, holds, timeout_s)


def _check(started: float, timeout_s: float, holds: Callable[[], object]) -> None:
    if time.monotonic() - started > timeout_s:
        raise TimeoutError(f"{holds} did not hold within {timeout_s:g} s")
