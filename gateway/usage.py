"""What tenants have used, kept by a process for itself or by all processes of a gateway together.

A shared file, in memory, has a slot a tenant, found by the digest of its name:

    digest │ requests: level, time │ tokens: level, time │ requests that run in process 0, 1, …

Each process counts what runs in it in a column of its own, so that the requests of one that was
killed can be taken back. A slot is read and written under a lock that lasts microseconds.
"""

import fcntl
import hashlib
import mmap
import os
import time
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from paceline.core.errors import ConfigError

MAX_PROCESSES = 64
MAX_TENANTS = 1 << 14  # more than a key file of its greatest size can name
LOCK_S = 0.25  # who holds it for so long was stopped in the middle
STUCK_S = 5.0  # and is not waited for again so soon; counts may be wrong by what it was about to do
_SPIN_S = 0.001
_DIGEST_WORDS, _LEVEL_WORDS = 2, 2
_WORD_BYTES = 8
_RUNNING = _DIGEST_WORDS + 2 * _LEVEL_WORDS
_SLOT_WORDS = _RUNNING + MAX_PROCESSES
FULL = float("inf")  # of a bucket that nothing was taken from, whatever its size

if TYPE_CHECKING:
    Level = memoryview[float]  # of a bucket: what is in it, and when that was
    Words = memoryview[int]
else:
    Level = Words = memoryview


class Usage(Protocol):
    """Of one tenant."""

    @property
    def requests(self) -> Level: ...

    @property
    def tokens(self) -> Level: ...

    @property
    def num_running(self) -> int: ...

    def locked(self) -> AbstractContextManager[None]:
        """Around whatever looks at a level and changes it."""
        ...

    def count(self, change: int) -> None:
        """Of the requests that run here."""
        ...


class OwnUsage:
    """Kept by this process alone."""

    def __init__(self) -> None:
        self.requests: Level = memoryview(array("d", (FULL, 0.0)))
        self.tokens: Level = memoryview(array("d", (FULL, 0.0)))
        self.num_running = 0

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def count(self, change: int) -> None:
        self.num_running += change


class Usages(Protocol):
    def of(self, tenant: str) -> Usage:
        """Raises ConfigError when there is no place for it."""
        ...


class OwnUsages:
    def of(self, tenant: str) -> Usage:
        return OwnUsage()


class SharedUsage:
    """A slot of the file, as one process sees it."""

    def __init__(self, lock: "_Lock", words: Words, column: int) -> None:
        self._lock = lock
        self._running = words[_RUNNING:]
        self._column = column
        levels = words[_DIGEST_WORDS:_RUNNING].cast("B").cast("d")
        self.requests: Level = levels[:_LEVEL_WORDS]
        self.tokens: Level = levels[_LEVEL_WORDS:]

    @property
    def num_running(self) -> int:
        return sum(self._running)

    def locked(self) -> AbstractContextManager[None]:
        return self._lock.held()

    def count(self, change: int) -> None:
        self._running[self._column] += change


class SharedUsages:
    """The file of `new_usage_file` as process number `column` sees it."""

    def __init__(self, fd: int, column: int) -> None:
        self._fd = fd
        self._column = column
        self._table_lock = _Lock(fd, MAX_TENANTS)  # a byte of no slot
        self._words = memoryview(mmap.mmap(fd, 0)).cast("q")

    def of(self, tenant: str) -> Usage:
        digest = hashlib.sha256(tenant.encode()).digest()[: _DIGEST_WORDS * _WORD_BYTES]
        first = int.from_bytes(digest) % MAX_TENANTS
        with self._table_lock.held():
            for step in range(MAX_TENANTS):
                slot = (first + step) % MAX_TENANTS
                words = self._slot(slot)
                name = words[:_DIGEST_WORDS].cast("B")
                if not any(name):
                    name[:] = digest
                    levels = words[_DIGEST_WORDS:_RUNNING].cast("B").cast("d")
                    levels[:] = array("d", (FULL, 0.0, FULL, 0.0))
                if name == digest:
                    return SharedUsage(_Lock(self._fd, slot), words, self._column)
        reason = f"more than {MAX_TENANTS} tenants since the gateway was started: start it again"
        raise ConfigError("api_keys", tenant, reason)

    def forget_running(self, column: int) -> None:
        """What ran in process number `column`, which has ended."""
        for first in range(_RUNNING + column, len(self._words), _SLOT_WORDS):
            if self._words[first]:  # writing would bring in the whole file
                self._words[first] = 0

    def _slot(self, slot: int) -> Words:
        return self._words[slot * _SLOT_WORDS : (slot + 1) * _SLOT_WORDS]


def new_usage_file() -> int:
    """A descriptor, to be handed to each process."""
    fd = os.memfd_create("paceline-usage")
    os.ftruncate(fd, MAX_TENANTS * _SLOT_WORDS * _WORD_BYTES)
    return fd


class _Lock:
    """Of one byte of the file, between processes. The kernel frees it when its process dies."""

    def __init__(self, fd: int, byte: int) -> None:
        self._fd = fd
        self._byte = byte
        self._stuck_until_s = 0.0

    @contextmanager
    def held(self) -> Iterator[None]:
        is_ours = self._take() or self._wait()
        try:
            yield
        finally:
            if is_ours:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, self._byte)

    def _take(self) -> bool:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._byte)
        except BlockingIOError:
            return False
        return True

    def _wait(self) -> bool:
        began_s = time.monotonic()
        while self._stuck_until_s < (now_s := time.monotonic()) < began_s + LOCK_S:
            time.sleep(0 if now_s - began_s < _SPIN_S else _SPIN_S)
            if self._take():
                return True
        self._stuck_until_s = max(self._stuck_until_s, began_s + STUCK_S)
        return False
