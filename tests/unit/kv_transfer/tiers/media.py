"""A store in memory that fails, hangs and is slow when told to."""

import errno
import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class MemoryMedium:
    num_readers: int = 2
    objects: dict[int, bytes] = field(default_factory=dict)
    write_errors: list[int] = field(default_factory=list)  # errno of the next writes; 0: none
    read_error: int = 0
    deletes: bool = True
    num_unlisted: int = 0  # next calls that list nothing, and fail
    bugs: int = 0  # calls that raise what a store should not
    may_write: threading.Event = field(default_factory=threading.Event)
    may_read: threading.Event = field(default_factory=threading.Event)
    num_hanging: int = 0

    def __post_init__(self) -> None:
        self.may_write.set()
        self.may_read.set()

    def sizes(self) -> dict[int, int]:
        if self.num_unlisted:
            self.num_unlisted -= 1
            raise OSError(errno.EIO, "not now")
        return {number: len(data) for number, data in self.objects.items()}

    def write(self, number: int, data: memoryview, reuse: int | None = None) -> None:
        self._wait(self.may_write)
        if reuse is not None:
            self.delete(reuse)
        self._meet_bug()
        if self.write_errors and (code := self.write_errors.pop(0)):
            raise OSError(code, errno.errorcode[code])
        assert number not in self.objects
        self.objects[number] = bytes(data)

    def read_into(self, number: int, offset: int, buffer: memoryview) -> None:
        self._wait(self.may_read)
        self._meet_bug()
        if self.read_error or number not in self.objects:
            code = self.read_error or errno.ENOENT
            raise OSError(code, errno.errorcode[code])
        data = self.objects[number][offset : offset + len(buffer)]
        assert len(data) == len(buffer) and offset % 4096 == len(buffer) % 4096 == 0
        buffer[:] = data

    def delete(self, number: int) -> None:
        if not self.deletes:
            raise OSError(errno.EACCES, "denied")
        self.objects.pop(number, None)

    def close(self) -> None:
        pass

    def _meet_bug(self) -> None:
        if self.bugs:
            self.bugs -= 1
            raise ValueError("a bug in a store's client")

    def _wait(self, event: threading.Event) -> None:
        self.num_hanging += 1
        event.wait(20)
        self.num_hanging -= 1
