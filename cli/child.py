"""One process of a deployment: started with a log file, watched, stopped.

We keep its log open, so that it can be read and bounded whatever becomes of the file's name.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.core.launch import dying_with_us

TAIL_BYTES = 8 << 10
MAX_LOG_BYTES = 64 << 20

Probe = Callable[[], str]  # why it is not ready yet; empty when it is
Prepare = Callable[[], None]  # may raise PacelineError or OSError


def prepare_nothing() -> None:
    pass


@dataclass(slots=True)
class Child:
    """Start it from a thread that outlives it: the kernel kills it when that thread ends."""

    name: str
    command: list[str]
    environment: dict[str, str]
    log_path: Path
    probe: Probe
    prepare_folder: Prepare = prepare_nothing  # for its log, which can do without
    prepare: Prepare = prepare_nothing  # what it reads: without that it is not started
    started_at: float = 0.0
    num_starts: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _log: int | None = field(default=None, repr=False)

    def start(self) -> None:
        """Raises OSError when the machine has no room for it, and what `prepare` raises."""
        self.close()
        self.prepare()
        self._log = log = self._open_log()
        self._process = subprocess.Popen(
            dying_with_us(self.command),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C of the terminal is ours to pass on, in order
        )
        self.started_at = time.monotonic()
        self.num_starts += 1

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Does nothing when it has ended."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, or None if it still runs after `timeout_s`."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self, timeout_s: float) -> bool:
        """SIGTERM, then SIGKILL after `timeout_s`. True if it left by itself with code 0."""
        self.send(signal.SIGTERM)
        if (code := self.wait(timeout_s)) is None:
            self.send(signal.SIGKILL)
            code = self.process.wait()
        return code == 0

    def ending(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def tail(self, num_lines: int = 15) -> str:
        """The last lines of its log."""
        if self._log is None:
            return ""
        start = max(0, os.fstat(self._log).st_size - TAIL_BYTES)
        lines = os.pread(self._log, TAIL_BYTES, start).decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def bound_log(self) -> None:
        """Starts the log anew when it is too long (it is open for appending)."""
        if self._log is not None and os.fstat(self._log).st_size > MAX_LOG_BYTES:
            os.ftruncate(self._log, 0)

    def close(self) -> None:
        """Lets go of the log; its tail is gone with that."""
        log, self._log = self._log, None
        if log is not None:
            os.close(log)

    def _open_log(self) -> int:
        """In memory where no file can be had: better a log without a name than no process."""
        with contextlib.suppress(OSError, PacelineError):
            self.prepare_folder()
            return os.open(self.log_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        log = os.memfd_create(f"{self.name}.log")
        fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)
        return log
