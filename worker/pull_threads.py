"""Threads that copy KV from other workers, shared out among the sources.

A source that stops answering holds its threads until its silence is noticed; as a source gets only
some of them, the others go on meanwhile. A turn is taken before pages are pinned, so that no pin
waits for a thread.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class PullThreads:
    def __init__(self, num_threads: int) -> None:
        self._free = asyncio.Semaphore(num_threads)
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="pull")

    def has_turn(self, of_source: asyncio.Semaphore) -> bool:
        """Whether a turn would begin at once."""
        return not (of_source.locked() or self._free.locked())

    @asynccontextmanager
    async def turn(self, of_source: asyncio.Semaphore) -> AsyncIterator[None]:
        """Within it `submit` has a thread at once; one call at a time."""
        async with of_source, self._free:
            yield

    def submit(self, copy: Callable[[], T]) -> "Future[T]":
        return self._executor.submit(copy)

    def close(self) -> None:
        self._executor.shutdown(wait=False)
