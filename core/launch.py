"""Runs a program that dies with its parent: `python launch.py PARENT_PID PROGRAM [ARGUMENT …]`.

The kernel sends SIGKILL when the thread that started us ends; the setting survives exec. Nothing
is left behind, even when the parent is killed with -9. Imports the standard library only, so that
it costs milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def dying_with_us(command: list[str]) -> list[str]:
    """`command`, to be started by a thread that lives as long as its process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    parent, *command = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        sys.exit("the parent is gone")  # it died before the setting took hold
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
