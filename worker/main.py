"""Runs a front process until SIGTERM or SIGINT; what both roles' main modules call."""

import asyncio
import gc
import signal
import sys

import uvloop

from paceline.core import keys, logs
from paceline.worker.config import WorkerConfig
from paceline.worker.front import Front, Side
from paceline.worker.rank_program import RankProgram

SWITCH_INTERVAL_S = 0.0005  # copies release the GIL; the event loop must get it back soon


def run(config: WorkerConfig, side: Side, first_rank: RankProgram) -> int:
    """Blocks; 0 after a drain. Raises ConfigError when the worker cannot start."""
    logs.configure(side.name)
    keys.self_test()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, side, first_rank))
    return 0


async def _serve(config: WorkerConfig, side: Side, first_rank: RankProgram) -> None:
    front = Front(config, side, first_rank)  # within the loop that its server will run on
    gc.freeze()  # what start-up made stays: no need to look at it again
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await front.serve_until(stop)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # asked again while we leave
