"""The private folder of a deployment: its logs, its sockets, the settings of its Redis.

A mark in it is locked while its owner lives. A folder whose mark nobody locks was left by one that
was killed, and the next deployment with the same parent removes it.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from paceline.cli.setup_error import SetupError

PREFIX = "paceline-"
MARK = ".owner"
SECRET = "secret"


class RunFolder:
    """Makes a new folder in `parent` (None: the system's), and sweeps out those of dead owners.
    Raises SetupError where it cannot be made."""

    def __init__(self, parent: Path | None) -> None:
        where = "for temporary files" if parent is None else f"in {parent}"
        try:
            place = Path(tempfile.gettempdir()) if parent is None else parent
            sweep(place)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            self._mark = self._lock_mark()
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            raise SetupError(
                f"no folder can be made {where}: {reason}; give a better place with --run-dir"
            ) from None

    def restore(self) -> None:
        """Makes it again if somebody has removed it. Raises SetupError or OSError."""
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700, parents=True)
        if not is_ours(self.path):
            raise SetupError(f"{self.path} belongs to somebody else now")
        if not (self.path / MARK).exists():
            mark, self._mark = self._mark, self._lock_mark()
            os.close(mark)

    def write_secret(self, secret: str) -> None:
        """For who may look into the folder: `paceline explain` needs it. Raises SetupError."""
        try:
            with open(self.secret_path, "x", opener=_private) as file:
                file.write(secret)
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            raise SetupError(f"{self.path} cannot be written to: {reason}") from None

    @property
    def secret_path(self) -> Path:
        return self.path / SECRET

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._mark)

    def leave(self) -> None:
        """Leaves its logs to be read until the next deployment sweeps it out."""
        self.secret_path.unlink(missing_ok=True)
        os.close(self._mark)

    def keep(self) -> None:
        """Leaves it and its logs to the user: without a mark nobody sweeps it out."""
        for name in (MARK, SECRET):
            (self.path / name).unlink(missing_ok=True)
        os.close(self._mark)

    def _lock_mark(self) -> int:
        """It is locked before it has its name: a sweep never finds it free."""
        mark, name = tempfile.mkstemp(dir=self.path)
        fcntl.flock(mark, fcntl.LOCK_EX)
        os.rename(name, self.path / MARK)
        return mark


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def sweep(place: Path) -> None:
    """Removes folders of ours in `place` whose owner is dead."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # not ours to look into, or somebody is faster
            if is_ours(folder):
                sweep_one(folder)


def sweep_one(folder: Path) -> None:
    mark = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its owner lives
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(mark)


def is_ours(folder: Path) -> bool:
    """A folder, no link, that only we can look into."""
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    return private and found.st_uid == os.getuid()
