"""Threads that copy are shared out: a source that hangs cannot take them all."""

import asyncio
import threading

from paceline.worker.pull_threads import PullThreads


async def test_a_source_that_hangs_leaves_threads_for_others() -> None:
    threads, go_on = PullThreads(4), threading.Event()
    hanging, healthy = asyncio.Semaphore(2), asyncio.Semaphore(2)

    async def hang() -> None:
        async with threads.turn(hanging):
            await asyncio.wrap_future(threads.submit(go_on.wait))

    stuck = [asyncio.create_task(hang()) for _ in range(6)]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(5), threads.turn(healthy):
            assert await asyncio.wrap_future(threads.submit(lambda: "copied")) == "copied"
    finally:
        go_on.set()
        await asyncio.gather(*stuck)
        threads.close()


async def test_who_waits_for_a_turn_can_be_cancelled() -> None:
    threads, source = PullThreads(1), asyncio.Semaphore(1)

    async def wait() -> None:
        async with threads.turn(source):
            pass

    async with threads.turn(source):
        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(5):
        await wait()
    threads.close()
