"""The program of a rank, started: it imports torch before it looks at its configuration.

That takes longest of all that a start needs. So a front starts its first rank before it imports
what it needs itself, and both load at the same time.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec

from paceline.core.errors import EngineFailure
from paceline.core.launch import dying_with_us
from paceline.kv_transfer.pool_memory import new_pool_file

# Two threads on two quiet cores decode SmolLM2-135M as fast as when they spin for ever (26.8 and
# 26.4 tok/s; never: 15.9). 200 matrix-vector products beside 8 busy processes: 1.1 s, not 3.3.
SPIN_COUNT = "30000"
_COMMAND = [sys.executable, "-P", "-m", "paceline.worker.rank_main"]


class RankProgram:
    """A process, and the file of the page pool that it inherits. Made by the main thread, with
    which it dies. Raises EngineFailure when torch is not installed.

    `configure` it once; `discard` it, or wait for its end and `close_pool`.
    """

    def __init__(self) -> None:
        if find_spec("torch") is None:
            raise EngineFailure("a worker needs torch: pip install 'paceline[engine]'")
        self.pool_fd = new_pool_file()
        try:
            self._process = subprocess.Popen(
                dying_with_us(_COMMAND),  # from the first moment on, also while torch is imported
                stdin=subprocess.PIPE,
                pass_fds=(self.pool_fd,),
                env=rank_environment(os.environ),
            )
        except BaseException:
            os.close(self.pool_fd)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def configure(self, message: bytes) -> None:
        """It is what the rank waits for. Nothing happens when it has died."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(message)

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        """Its exit status."""
        if self.returncode is None:
            await _readable(os.pidfd_open(self.pid))
        return self._process.wait()

    def discard(self) -> None:
        """Ends it at once, if it runs, and closes the pool, if that is open."""
        self.kill()
        self._process.communicate()
        self.close_pool()

    def close_pool(self) -> None:
        fd, self.pool_fd = self.pool_fd, -1
        if fd >= 0:
            os.close(fd)


@contextmanager
def started_ahead() -> Iterator[RankProgram]:
    """A front's first rank, which nothing is left of when the block ends."""
    program = RankProgram()
    try:
        yield program
    finally:
        program.discard()


def rank_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Of a rank: threads that wait for each other spin for a while only, unless it is set."""
    settings = dict(given)
    if "OMP_WAIT_POLICY" not in given:
        settings.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    return settings


async def _readable(fd: int) -> None:
    """Closes it in any case."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
