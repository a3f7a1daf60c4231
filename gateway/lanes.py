"""Threads for work on texts, in two lanes: a short text never waits behind long ones.

A tokenizer lets go of the interpreter's lock, so these threads leave the event loop free, too.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from paceline.core.host_cpus import usable_cores

T = TypeVar("T")

SHORT_CHARS = 16 << 10  # tokenised in some 10 ms
_SHORT_THREADS = 2
_MAX_LONG_THREADS = 4


class Lanes:
    """Work that is cancelled while it waits is not done."""

    def __init__(self) -> None:
        num_long = usable_cores() // 2  # the rest is for the event loop
        num_long = max(1, min(num_long, _MAX_LONG_THREADS))
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "short-texts")
        self._long = ThreadPoolExecutor(num_long, "long-texts")

    async def short(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._short, work)

    async def long(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._long, work)

    def close(self) -> None:
        """Does not wait for what is under way."""
        self._short.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)
