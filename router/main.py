"""Process of the router: signals in, exit code out."""

import asyncio
import gc
import signal
from collections.abc import Coroutine
from typing import Any

import structlog
import uvloop

from paceline.core import logs
from paceline.router.config import RouterConfig
from paceline.router.service import Router

log = structlog.stdlib.get_logger("paceline.router")


def run(config: RouterConfig) -> int:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the drain."""
    logs.configure("router")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config))


async def serve(config: RouterConfig) -> int:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    router = Router(config)
    try:
        await router.start()
        gc.freeze()  # what start-up made stays: no need to look at it again
        await _first(signals.get(), router.failed())
        failed = router.failure()
        log.info("draining", in_flight=router.coordinator.num_in_flight, exc_info=failed)
        await _first(signals.get(), router.drain())
    finally:
        await router.stop()
    log.info("stopped")
    return 1 if failed else 0


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
