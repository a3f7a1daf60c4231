"""What goes wrong while things are prepared on the user's machine."""

import errno

from paceline.core.errors import PacelineError


class SetupError(PacelineError):
    """Something on this machine has to be mended first; the message says what and how."""


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
