"""Streams that decode while long prompts come: the load of two_cards, run in a client process."""

import asyncio
import functools
import gc
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.kill_worker import kill_tree
from benchmarks.token_streams import Ask, Stream, Target, attached

T = TypeVar("T")
LONG_OUTPUT = 2
BEGUN_S = 60.0  # within which half of the streams must have a token


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths in tokens. `rates` are of long prompts a second."""

    num_streams: int = 64
    prompt: int = 512
    output: int = 900
    long_prompt: int = 8000
    vocab_size: int = 128000
    rates: tuple[int, ...] = ()
    settle_s: float = 3.0  # from the streams' start to the first long prompt
    window_s: float = 7.0  # in which they come

    def ask(self, chance: random.Random) -> Ask:
        return Ask([chance.randrange(2, self.vocab_size) for _ in range(self.prompt)], self.output)

    def long_ask(self, chance: random.Random) -> Ask:
        prompt = [chance.randrange(2, self.vocab_size) for _ in range(self.long_prompt)]
        return Ask(prompt, LONG_OUTPUT)


@dataclass(frozen=True, slots=True)
class Run:
    """What was seen at one rate; the window on the streams' clock."""

    rate: int
    start_s: float
    end_s: float
    streams: list[Stream]
    longs: list[Stream]


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all runs: gRPC is not at home in a second one."""
    return asyncio.new_event_loop()


def _run(work: Coroutine[Any, Any, T]) -> T:
    return _loop().run_until_complete(work)


def failures(streams: list[Stream]) -> list[str]:
    return [stream.error for stream in streams if stream.error]


def run_rate(target: Target, load: Load, rate: int) -> Run:
    gc.disable()  # no pause of ours in a gap
    try:
        return _run(_run_rate(target, load, rate))
    finally:
        gc.enable()


async def _run_rate(target: Target, load: Load, rate: int) -> Run:
    chance = random.Random(rate)
    asks = [load.ask(chance) for _ in range(load.num_streams)]
    long_asks = [load.long_ask(chance) for _ in range(int(load.window_s * rate))]
    async with attached(target) as client:
        streams = [asyncio.create_task(client.run(ask)) for ask in asks]
        await asyncio.sleep(load.settle_s)
        start_s, longs = time.perf_counter(), []
        for number, ask in enumerate(long_asks, 1):
            longs.append(asyncio.create_task(client.run(ask)))
            await asyncio.sleep(start_s + number / rate - time.perf_counter())
        await asyncio.sleep(start_s + load.window_s - time.perf_counter())
        end_s = time.perf_counter()
        return Run(
            rate, start_s, end_s, await asyncio.gather(*streams), await asyncio.gather(*longs)
        )


def run_idle(target: Target, load: Load, count: int) -> list[Stream]:
    """Long prompts, one after the other."""
    return _run(_run_idle(target, load, count))


async def _run_idle(target: Target, load: Load, count: int) -> list[Stream]:
    chance = random.Random(str(count))
    async with attached(target) as client:
        return [await client.run(load.long_ask(chance)) for _ in range(count)]


def run_kill(target: Target, load: Load, pid: int | None) -> list[Stream]:
    """All streams at once; the worker with this front is killed when half have their first token,
    so that KV of many is on its way. None: nothing is."""
    return _run(_run_kill(target, load, pid))


async def _run_kill(target: Target, load: Load, pid: int | None) -> list[Stream]:
    chance = random.Random(load.prompt)
    async with attached(target) as client:
        asks = [load.ask(chance) for _ in range(load.num_streams)]
        tasks = [asyncio.create_task(client.run(ask)) for ask in asks]
        if pid is not None:
            async with asyncio.timeout(BEGUN_S):
                for _ in range(load.num_streams // 2):
                    await client.begun.acquire()
            kill_tree(pid)
        return await asyncio.gather(*tasks)
