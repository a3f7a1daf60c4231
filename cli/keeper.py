"""Watches the processes of a deployment: reports one that dies and starts it again."""

import threading
import time
from collections.abc import Callable, Mapping

from paceline.cli.child import Child
from paceline.core.errors import PacelineError

POLL_S = 0.2
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
STEADY_S = 60.0  # a process that lived so long starts with the first back-off again


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
                elif child.name not in self._due:
                    self._report(child, restart)
                elif time.monotonic() >= self._due[child.name]:
                    self._restart(child)

    def _report(self, child: Child, restart: bool) -> None:
        if restart:
            lived_s = time.monotonic() - child.started_at
            known_s = self._backoff_s.get(child.name, 0.0) if lived_s < STEADY_S else 0.0
            next_step = f"starting it again in {self._back_off(child, known_s):g} s"
        else:
            self._due[child.name] = float("inf")
            next_step = "it stays down"
        self._show(child.name, f"{child.ending()}; {next_step}; its log ends:\n{child.tail()}")

    def _back_off(self, child: Child, known_s: float) -> float:
        """Sets when it starts again: in twice as long as it was the last time."""
        backoff_s = min(2 * known_s, MAX_BACKOFF_S) or FIRST_BACKOFF_S
        self._backoff_s[child.name] = backoff_s
        self._due[child.name] = time.monotonic() + backoff_s
        return backoff_s

    def _restart(self, child: Child) -> None:
        try:
            self._spawn(child)
        except (OSError, RuntimeError, PacelineError) as error:  # no room for it or its files
            backoff_s = self._back_off(child, self._backoff_s[child.name])
            self._show(child.name, f"cannot be started: {error}; once more in {backoff_s:g} s")
            return
        del self._due[child.name]
        self.num_restarts += 1
        self._show(child.name, f"started again (pid {child.pid})")
