"""What `paceline up` shows: a table on a terminal while things start, plain lines elsewhere."""

import contextlib
import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

MARKS = {"ready": "✔", "stopped": "–"}  # of what changes no more


def say(text: str) -> None:
    """A line on stderr, if anybody is there: a closed terminal must not keep us from draining."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Display:
    """Call with (process, what it does now), from any thread. Inside `with` a table, then lines."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._states: dict[str, tuple[str, float]] = {}
        self._began = time.monotonic()
        self._live: Live | None = None
        self._lock = threading.Lock()

    @property
    def is_live(self) -> bool:
        """A table stands there: lines of others would tear it apart."""
        return self._live is not None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._table, console=self._console)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, name: str, status: str) -> None:
        with self._lock:
            elapsed = time.monotonic() - self._began
            self._states[name] = (status, elapsed)
            if self._live is None:
                say(f"{name:<12}{status}")

    def _table(self) -> Table:
        table = Table(box=None, show_header=False)
        with self._lock:
            for name, (status, elapsed) in self._states.items():
                ready = status == "ready"
                mark = Text(MARKS[status], "green") if status in MARKS else Spinner("dots")
                took = f"{elapsed:.1f} s" if ready else ""
                table.add_row(mark, name, Text(status.splitlines()[0]), took)
        return table
