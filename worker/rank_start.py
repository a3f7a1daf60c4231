"""Entry of a rank process: it ends with its front from the first moment on, also while torch is
imported. Its argument is the front's process id; rank_main reads the rest."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent_pid: int) -> None:
    """The kernel kills us when the front's main thread ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it ended before we asked


def main() -> int:
    end_with(int(sys.argv[1]))
    from paceline.worker import rank_main  # takes seconds

    return rank_main.main()


if __name__ == "__main__":
    sys.exit(main())
