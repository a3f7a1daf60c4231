"""What a tier of segments is written to: a folder of files, a bucket of objects."""

from typing import Protocol


class SegmentMedium(Protocol):
    """Objects by number. Every call may block for long and may raise OSError."""

    num_readers: int  # reads under way at once

    def sizes(self) -> dict[int, int]:
        """Bytes of each object that is there whole."""
        ...

    def write(self, number: int, data: memoryview, reuse: int | None = None) -> None:
        """All or nothing: after an error, or a crash, there is no such object; a store behind a
        network may come to have it after an error all the same. `reuse`: one that is wanted no
        more, whose room may be taken if it is still there; it is gone afterwards."""
        ...

    def read_into(self, number: int, offset: int, buffer: memoryview) -> None:
        """Fills `buffer`. Offset and length are multiples of ALIGNMENT."""
        ...

    def delete(self, number: int) -> None: ...

    def close(self) -> None: ...
