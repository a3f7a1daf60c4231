"""One rank process and what dies with it: its page pool, its incarnation, its link."""

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import msgspec

from paceline.core.errors import ConfigError, EngineFailure, ErrorCode
from paceline.core.ids import Incarnation
from paceline.core.launch import dying_with_us
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import LocalPool
from paceline.kv_transfer.pool_memory import (
    new_pool_file,
    open_pool_memory,
    seal_pool_memory,
)
from paceline.worker.config import WorkerConfig
from paceline.worker.rank_link import RankLink
from paceline.worker.rank_messages import RankConfig, RankFailed, RankReady
from paceline.worker.rank_reader import LinkCalls

# Two threads on two quiet cores decode SmolLM2-135M as fast as when they spin for ever (26.8 and
# 26.4 tok/s; never: 15.9). 200 matrix-vector products beside 8 busy processes: 1.1 s, not 3.3.
SPIN_COUNT = "30000"
LAST_WORDS_S = 1.0
_COMMAND = [sys.executable, "-P", "-m", "paceline.worker.rank_main"]


@dataclass(slots=True, eq=False)
class RankProcess:
    """A running rank. `memory` maps its pool; whoever copies keeps a reference to it. Into a pool
    on a device the rank copies, when it is asked to by `link_calls`."""

    incarnation: Incarnation
    process: asyncio.subprocess.Process
    link: RankLink
    pool_fd: int
    ready: RankReady
    memory: memoryview | None  # None: the pool is on a device
    link_calls: LinkCalls

    def local_pool(self) -> LocalPool | None:
        """What sources export and readers copy into, rank after rank; None: it is on a device."""
        if self.memory is None:
            return None
        num_pages = len(self.ready.ranks) * self.ready.num_all_pages
        return LocalPool(self.memory, self.ready.groups[0], num_pages, self.pool_fd)

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()

    async def stop(self) -> None:
        """Ends the process; calls that are under way fail."""
        self.kill()
        await self.process.wait()
        await self.link.close()
        self.link_calls.close()

    async def close(self) -> None:
        """Once it has stopped: frees the pool, at once unless a copy still holds `memory`."""
        os.close(self.pool_fd)
        if self.memory is not None:
            with contextlib.suppress(BufferError):
                self.memory.release()  # what still refers to it waits for a garbage collection


async def launch(config: WorkerConfig) -> RankProcess:
    """Starts a rank and waits, for as long as it lives, until it can compute.

    Raises ConfigError when the model or a setting is at fault, EngineFailure when it dies or torch
    is not installed.
    """
    if find_spec("torch") is None:
        raise EngineFailure("a worker needs torch: pip install 'paceline[engine]'")
    fd = new_pool_file()
    link = RankLink(config.run_dir)
    incarnation = Incarnation(secrets.token_hex(8))
    process = None
    try:
        process = await _spawn(config, fd, link, incarnation)
        ready = await _await_ready(process, link)
        memory = await _open_pool(fd)
    except BaseException:
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        await link.close()
        os.close(fd)
        raise
    link.hide()
    return RankProcess(incarnation, process, link, fd, ready, memory, LinkCalls(link.send))


async def _open_pool(fd: int) -> memoryview | None:
    """Our view of the pool that the rank has made; None when it is on a device."""
    if os.fstat(fd).st_size == 0:
        return None
    memory = await asyncio.to_thread(open_pool_memory, fd)
    seal_pool_memory(fd)  # both of us have mapped it: from now on others only read
    return memory.view


async def _spawn(
    config: WorkerConfig, fd: int, link: RankLink, incarnation: Incarnation
) -> asyncio.subprocess.Process:
    addresses = (link.command_address, link.step_address, link.pool_address)
    message = rank_config(config, fd, incarnation, addresses)
    process = await asyncio.create_subprocess_exec(
        *dying_with_us(_COMMAND),  # from the first moment on, also while torch is imported
        stdin=asyncio.subprocess.PIPE,
        pass_fds=(fd,),
        env=rank_environment(os.environ),
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.msgpack.encode(message))
    process.stdin.close()
    return process


def rank_config(
    config: WorkerConfig, fd: int, incarnation: str, addresses: tuple[str, str, str]
) -> RankConfig:
    """`addresses`: where commands come from, steps go to, and the pool is asked."""
    on_device = config.compute.device != "cpu"
    names = registry.names_of(config.links.transports, on_device=on_device, tls=config.tls)
    command_address, step_address, pool_address = addresses
    return RankConfig(
        model=config.model,
        compute=config.compute,
        steps=config.steps,
        incarnation=incarnation,
        transports=tuple(names) if on_device else (),
        pool_fd=fd,
        max_waiting=config.max_slots,
        max_pinned_share=config.links.max_pinned_share,
        command_address=command_address,
        step_address=step_address,
        pool_address=pool_address,
    )


def rank_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Of a rank: threads that wait for each other spin for a while only, unless it is set."""
    settings = dict(given)
    if "OMP_WAIT_POLICY" not in given:
        settings.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    return settings


async def _await_ready(process: asyncio.subprocess.Process, link: RankLink) -> RankReady:
    died = asyncio.create_task(process.wait())
    first = asyncio.create_task(_first_contact(link))
    try:
        await asyncio.wait((died, first), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((first,), timeout=LAST_WORDS_S)  # they may come after its end
        if not first.done():
            raise EngineFailure(f"the rank process died while loading, status {died.result()}")
        return first.result()
    finally:
        died.cancel()
        first.cancel()


async def _first_contact(link: RankLink) -> RankReady:
    output = await link.receive()
    if isinstance(output, RankFailed):
        if output.code is ErrorCode.CONFIG:
            raise ConfigError.relayed(output.message, field=output.field)
        raise EngineFailure(output.message)
    assert isinstance(output, RankReady)
    await link.greet()
    return output
