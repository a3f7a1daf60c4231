"""Watches the processes of a deployment: reports one that dies and starts it again."""

import threading
import time
from collections.abc import Callable, Mapping

from paceline.cli.child import Child
from paceline.core.errors import PacelineError

POLL_S = 0.05
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
STEADY_S = 60.0  # a process that lived so long starts again at once


class Keeper:
    """`spawn` starts a child; `show(name, text)` is told what happens. One thread of its own."""

    def __init__(self, spawn: Callable[[Child], None], show: Callable[[str, str], None]) -> None:
        self.num_restarts = 0
        self._spawn = spawn
        self._show = show
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._due: dict[str, float] = {}  # when a dead process starts again
        self._backoff_s: dict[str, float] = {}

    def start(self, children: Mapping[str, Child], restart: bool) -> None:
        """`children` may grow while we watch."""
        self._thread = threading.Thread(
            target=self._watch, args=(children, restart), name="keeper", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Nothing is started any more when this returns."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self, children: Mapping[str, Child], restart: bool) -> None:
        while not self._stopping.wait(POLL_S):
            for child in list(children.values()):
                if child.is_running:
                    child.bound_log()
                    continue
                if child.name not in self._due:
                    self._report(child, restart)
                if time.monotonic() >= self._due[child.name]:
                    self._restart(child)

    def _report(self, child: Child, restart: bool) -> None:
        if restart:
            is_steady = time.monotonic() - child.started_at >= STEADY_S
            backoff_s = self._wait(child, 0.0 if is_steady else self._longer_s(child))
            when = f"in {backoff_s:g} s" if backoff_s else "at once"
            next_step = f"starting it again {when}"
        else:
            self._due[child.name] = float("inf")
            next_step = "it stays down"
        self._show(child.name, f"{child.ending()}; {next_step}; its log ends:\n{child.tail()}")

    def _longer_s(self, child: Child) -> float:
        """Twice as long as it waited the last time."""
        return min(2 * self._backoff_s.get(child.name, 0.0), MAX_BACKOFF_S) or FIRST_BACKOFF_S

    def _wait(self, child: Child, backoff_s: float) -> float:
        self._backoff_s[child.name] = backoff_s
        self._due[child.name] = time.monotonic() + backoff_s
        return backoff_s

    def _restart(self, child: Child) -> None:
        try:
            self._spawn(child)
        except (OSError, RuntimeError, PacelineError) as error:  # no room for it or its files
            backoff_s = self._wait(child, self._longer_s(child))
            self._show(child.name, f"cannot be started: {error}; once more in {backoff_s:g} s")
            return
        del self._due[child.name]
        self.num_restarts += 1
        self._show(child.name, f"started again (pid {child.pid})")
