"""One rank process and what dies with it: its page pool, its incarnation, its link."""

import asyncio
import contextlib
import os
import secrets
from dataclasses import dataclass

import msgspec

from paceline.core.errors import ConfigError, EngineFailure, ErrorCode
from paceline.core.ids import Incarnation
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import LocalPool
from paceline.kv_transfer.pool_memory import open_pool_memory, seal_pool_memory
from paceline.worker.config import WorkerConfig
from paceline.worker.rank_link import RankLink
from paceline.worker.rank_messages import RankConfig, RankFailed, RankReady
from paceline.worker.rank_program import RankProgram
from paceline.worker.rank_reader import LinkCalls

LAST_WORDS_S = 1.0


@dataclass(slots=True, eq=False)
class RankProcess:
    """A running rank. `memory` maps its pool; whoever copies keeps a reference to it. Into a pool
    on a device the rank copies, when it is asked to by `link_calls`."""

    incarnation: Incarnation
    program: RankProgram
    link: RankLink
    ready: RankReady
    memory: memoryview | None  # None: the pool is on a device
    link_calls: LinkCalls

    def local_pool(self) -> LocalPool | None:
        """What sources export and readers copy into, rank after rank; None: it is on a device."""
        if self.memory is None:
            return None
        num_pages = len(self.ready.ranks) * self.ready.num_all_pages
        return LocalPool(self.memory, self.ready.groups[0], num_pages, self.program.pool_fd)

    def kill(self) -> None:
        self.program.kill()

    async def stop(self) -> None:
        """Ends the process; calls that are under way fail."""
        self.kill()
        await self.program.wait()
        await self.link.close()
        self.link_calls.close()

    async def close(self) -> None:
        """Once it has stopped: frees the pool, at once unless a copy still holds `memory`."""
        self.program.close_pool()
        if self.memory is not None:
            with contextlib.suppress(BufferError):
                self.memory.release()  # what still refers to it waits for a garbage collection


async def launch(config: WorkerConfig, program: RankProgram | None = None) -> RankProcess:
    """Waits, for as long as `program` lives, until it can compute. None: a new one is started.

    Raises ConfigError when the model or a setting is at fault, EngineFailure when it dies or torch
    is not installed.
    """
    program = program or RankProgram()
    try:
        return await _configure(program, config)
    except BaseException:
        program.kill()
        await program.wait()
        program.discard()
        raise


async def _configure(program: RankProgram, config: WorkerConfig) -> RankProcess:
    incarnation = Incarnation(secrets.token_hex(8))
    link = RankLink(config.run_dir)
    try:
        addresses = (link.command_address, link.step_address, link.pool_address)
        message = rank_config(config, program.pool_fd, incarnation, addresses)
        program.configure(msgspec.msgpack.encode(message))
        ready = await _await_ready(program, link)
        memory = await _open_pool(program.pool_fd)
    except BaseException:
        await link.close()
        raise
    link.hide()
    return RankProcess(incarnation, program, link, ready, memory, LinkCalls(link.send))


async def _open_pool(fd: int) -> memoryview | None:
    """Our view of the pool that the rank has made; None when it is on a device."""
    if os.fstat(fd).st_size == 0:
        return None
    memory = await asyncio.to_thread(open_pool_memory, fd)
    seal_pool_memory(fd)  # both of us have mapped it: from now on others only read
    return memory.view


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


async def _await_ready(program: RankProgram, link: RankLink) -> RankReady:
    died = asyncio.create_task(program.wait())
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
