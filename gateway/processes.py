"""`paceline gateway`: one process, or several behind the same two ports.

    parent     keeps the ports, listens on none ── starts, watches, starts again ──► process 0, 1, …
    process    a whole gateway that listens on both: the kernel spreads connections over them

One that ends is started again, with back-off, while the others go on; one whose event loop stands
still for `stall_s` is ended. SIGTERM or SIGINT drains all at once, SIGHUP has all read the key file
again. None outlives its parent.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import replace

import structlog

from paceline.core import logs
from paceline.core.errors import ConfigError, EngineFailure, PacelineError
from paceline.core.launch import dying_with_us
from paceline.gateway.config import GatewayConfig
from paceline.gateway.ports import reserve
from paceline.gateway.sibling import Report, Sibling, report_of
from paceline.gateway.usage import SharedUsages, new_usage_file

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
STEADY_S = 60.0  # a process that lived so long starts with the first back-off again
START_S = 120.0  # one that does not say by then that it listens stands still
CUT_MARGIN_S = 10.0  # after the drain timeout: what is left then is killed
_MANY_BEATS = 1024
_COMMAND = [sys.executable, "-P", "-m", "paceline.gateway.sibling"]
logger = structlog.stdlib.get_logger("paceline.gateway")


def run(config: GatewayConfig) -> int:
    """Blocks until SIGTERM or SIGINT, drains, returns 0, or 1 when a process had to be killed.
    Raises ConfigError, and EngineFailure when one dies while it starts for the first time."""
    if config.shares_ports:
        return asyncio.run(_keep_all(config))
    from paceline.gateway import main  # parents do without: it takes 0.5 s and 60 MiB

    return main.run(config)


async def _keep_all(config: GatewayConfig) -> int:
    logs.configure("gateway")
    with (
        reserve(config.host, config.port, "port") as http,
        reserve(config.host, config.grpc_port, "grpc_port") as grpc,
    ):
        port, grpc_port = (kept.getsockname()[1] for kept in (http, grpc))
        return await Processes(replace(config, port=port, grpc_port=grpc_port)).serve()


class Processes:
    """All of one gateway, as their parent sees them."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._usage_fd = new_usage_file()
        self._usages = SharedUsages(self._usage_fd, 0)
        self._live: dict[int, asyncio.subprocess.Process] = {}  # by number
        self._listened: set[int] = set()  # at some time
        self._listening: set[int] = set()  # of the live ones
        self._stopping = asyncio.Event()
        self._all_clean = True

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._read_again)
        keepers = [loop.create_task(self._keep(i)) for i in range(self._config.processes)]
        asked = loop.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([asked, *keepers], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # of a keeper: how it failed
            await self._drain(keepers)
        finally:
            self._stopping.set()
            for process in self._live.values():
                process.kill()
            await asyncio.gather(asked, *keepers, return_exceptions=True)
            os.close(self._usage_fd)
        return 0 if self._all_clean else 1

    async def _keep(self, number: int) -> None:
        """Until it ends while we stop. Raises ConfigError, EngineFailure."""
        backoff_s = 0.0
        while True:
            began_s = time.monotonic()
            why = await self._run(number)
            if self._stopping.is_set():
                return
            if number not in self._listened:
                raise why
            if time.monotonic() - began_s > STEADY_S:
                backoff_s = 0.0
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S) or FIRST_BACKOFF_S
            logger.error("process ended", process=number, why=str(why), again_in_s=backoff_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)

    async def _run(self, number: int) -> PacelineError:
        """From its start to its end, which is told."""
        try:
            process = await self._start(number)
        except OSError as error:
            return EngineFailure(f"a process of the gateway cannot be started: {error.strerror}")
        report = await self._report_of(number, process)
        if report is not None and not report.error:
            self._listens(number)
            await self._while_it_beats(number, process)
        code = await process.wait()
        del self._live[number]
        self._listening.discard(number)
        self._usages.forget_running(number)
        if self._stopping.is_set():
            self._all_clean &= code in (0, -signal.SIGTERM)  # the latter: it was starting
        return _failure(report, code)

    async def _start(self, number: int) -> asyncio.subprocess.Process:
        process = self._live[number] = await asyncio.create_subprocess_exec(
            *dying_with_us(_COMMAND),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(self._usage_fd,),
        )
        if self._stopping.is_set():
            process.terminate()  # the others were told without it
        assert process.stdin is not None
        process.stdin.write(Sibling(self._config, number, self._usage_fd).encode())
        process.stdin.close()
        return process

    async def _report_of(self, number: int, process: asyncio.subprocess.Process) -> Report | None:
        """None: it ended, or was ended, without one."""
        assert process.stdout is not None
        try:
            return report_of(await asyncio.wait_for(process.stdout.readline(), START_S))
        except TimeoutError:
            logger.error("process does not start", process=number, start_s=START_S)
            process.kill()
            return None

    async def _while_it_beats(self, number: int, process: asyncio.subprocess.Process) -> None:
        """Until it ends, or stands still and is ended."""
        assert process.stdout is not None
        num_silent = 0
        while num_silent < 2:  # halves: one alone may be a time in which we stood still ourselves
            beats = process.stdout.read(_MANY_BEATS)
            try:
                if not await asyncio.wait_for(beats, self._config.stall_s / 2):
                    return
                num_silent = 0
            except TimeoutError:
                num_silent += 1
        logger.error("process stands still", process=number, stall_s=self._config.stall_s)
        process.kill()

    def _read_again(self) -> None:
        """Those that are starting read the key file anyway, and would die of the signal."""
        for number in self._listening:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                self._live[number].send_signal(signal.SIGHUP)

    def _listens(self, number: int) -> None:
        self._listening.add(number)
        if number in self._listened:
            logger.info("process started again", process=number)
            return
        self._listened.add(number)
        if len(self._listened) == self._config.processes:
            config = self._config
            ports = {"port": config.port, "grpc_port": config.grpc_port}
            logger.info("all listening", host=config.host, processes=config.processes, **ports)

    async def _drain(self, keepers: list[asyncio.Task[None]]) -> None:
        logger.info("stopping", timeout_s=self._config.drain_timeout_s)
        for process in self._live.values():
            process.terminate()
        await asyncio.wait(keepers, timeout=self._config.drain_timeout_s + CUT_MARGIN_S)


def _failure(report: Report | None, code: int) -> PacelineError:
    """Of a process that ended with `code`."""
    if report is not None and report.error:
        return ConfigError.relayed(report.error, field=report.field)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return EngineFailure(f"a process of the gateway {how}")
