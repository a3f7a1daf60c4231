"""Comments in a stream that brings no tokens for a while: proxies close what is silent for long."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COMMENT = b": keep-alive\n\n"  # clients skip lines that begin with a colon


@contextmanager
def heartbeat(
    interval_s: float, num_tokens: Callable[[], int], write: Callable[[bytes], object]
) -> Iterator[None]:
    """Around a stream. Looks every `interval_s`, so that a token costs nothing: a silence of one to
    two intervals has its comment."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def beat(num_before: int) -> None:
        nonlocal timer
        num_now = num_tokens()
        if num_now == num_before:
            write(COMMENT)
        timer = loop.call_later(interval_s, beat, num_now)

    timer = loop.call_later(interval_s, beat, num_tokens())
    try:
        yield
    finally:
        timer.cancel()
