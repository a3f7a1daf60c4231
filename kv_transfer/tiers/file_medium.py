"""A folder of files, written and read past the page cache where the file system allows it.

Several processes may share the folder: each takes the first sub-folder that no other has locked.
A file gets its name when it is whole; what a crash has left unfinished is removed at the start.
"""

import contextlib
import errno
import fcntl
import os
import re
from pathlib import Path

from paceline.core.errors import ConfigError

WRITE_BYTES = 64 << 20  # at once: a disk that waits for the next call rests
MAX_PROCESSES = 64
_NUMBER = re.compile("[0-9a-f]{16}")
_SUFFIX, _UNFINISHED = ".kv", ".tmp"


class FileMedium:
    num_readers = 2

    def __init__(self, field: str, path: Path) -> None:
        """Raises ConfigError, naming `field`, for a folder that cannot be had."""
        try:
            self._lock, self._folder = _take_folder(path)
            for unfinished in self._folder.glob("*" + _UNFINISHED):
                unfinished.unlink()
        except OSError as error:
            raise ConfigError(field, str(path), f"cannot be used: {error.strerror}") from None
        self._flags = getattr(os, "O_DIRECT", 0)

    def sizes(self) -> dict[int, int]:
        files = [f for f in self._folder.glob("*" + _SUFFIX) if _NUMBER.fullmatch(f.stem)]
        return {int(file.stem, 16): file.stat().st_size for file in files}

    def write(self, number: int, data: memoryview, reuse: int | None = None) -> None:
        final = self._file(number)
        unfinished = final.with_suffix(_UNFINISHED)
        try:
            if reuse is not None:  # a file system that frees blocks takes as long as for writing
                with contextlib.suppress(FileNotFoundError):  # somebody has emptied the folder
                    self._file(reuse).rename(unfinished)
            fd = self._open(unfinished, os.O_WRONLY | os.O_CREAT)
            try:
                os.ftruncate(fd, min(os.fstat(fd).st_size, len(data)))
                written = 0
                while written < len(data):
                    written += os.pwrite(fd, data[written : written + WRITE_BYTES], written)
            finally:
                os.close(fd)
            unfinished.rename(final)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def read_into(self, number: int, offset: int, buffer: memoryview) -> None:
        fd = self._open(self._file(number), os.O_RDONLY)
        try:
            num_read = 0
            while num_read < len(buffer):
                count = os.preadv(fd, [buffer[num_read:]], offset + num_read)
                if count == 0:
                    raise OSError(errno.EIO, "the file is shorter than it was")
                num_read += count
        finally:
            os.close(fd)

    def delete(self, number: int) -> None:
        self._file(number).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:016x}{_SUFFIX}"

    def _open(self, path: Path, flags: int) -> int:
        try:
            return os.open(path, flags | self._flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._flags:
                raise
            self._flags = 0  # this file system has no direct access
            return self._open(path, flags)


def _take_folder(path: Path) -> tuple[int, Path]:
    """The descriptor that locks it, and the first sub-folder that was free."""
    for number in range(MAX_PROCESSES):
        folder = path / str(number)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        except OSError:
            os.close(fd)
            raise
        return fd, folder
    raise OSError(errno.EBUSY, f"{MAX_PROCESSES} processes use it")
