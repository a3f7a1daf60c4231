"""Under make: the terminal's Ctrl-C is for us alone.

The terminal sends it to the whole foreground group. make would take it for itself, and end with an
error however well we drained. So we leave its group and take the terminal with us, as a shell does
for its jobs.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress


@contextmanager
def own_foreground(environ: Mapping[str, str]) -> Iterator[None]:
    """Does nothing unless make runs us in the foreground of a terminal."""
    if "MAKELEVEL" not in environ or not is_foreground():
        yield
        return
    terminal, group = sys.stdin.fileno(), os.getpgrp()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else we stop when we give the terminal back
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # nobody would wake us: make waits for our end
    os.setpgid(0, 0)
    os.tcsetpgrp(terminal, os.getpgrp())
    try:
        yield
    finally:
        with suppress(OSError):  # it may be closed, or make gone
            os.tcsetpgrp(terminal, group)


def is_foreground() -> bool:
    with suppress(OSError, ValueError, AttributeError):  # no terminal, or no input at all
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False
