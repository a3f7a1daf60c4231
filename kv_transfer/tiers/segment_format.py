"""A segment: many pages in one object of a store, and an index that says which.

    page | page | … | padding | index (msgpack) | padding | trailer
    └ page_bytes each                                      └ the last bytes of the object

The trailer says where the index lies and what it hashes to. An object without a good trailer and
index is not a segment: it was cut off. Pages are not hashed here: each has its checksums, in the
index. Sizes are multiples of ALIGNMENT, so that files can be written and read past the page cache.
"""

import contextlib
import hashlib
import mmap
import struct
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from paceline.core.keys import KEY_BYTES
from paceline.kv_transfer.base import CellSums
from paceline.kv_transfer.tiers.base import PageName
from paceline.kv_transfer.tiers.segment_books import MAX_PLACES

ALIGNMENT = 4096
MAGIC = b"PLKVSEG1"
TRAILER = struct.Struct("<8sQQ32s")  # magic, index offset, index length, SHA-256 of the index
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14; not in Python 3.11
_INDEX_BYTES_PER_PAGE = 64  # beside its checksums; generous
_INDEX_BYTES = 1024


class SegmentIndex(msgspec.Struct, frozen=True, array_like=True):
    layout_digest: str
    page_bytes: int
    keys: bytes  # KEY_BYTES each
    groups: list[int]
    checksums: list[list[Annotated[int, msgspec.Meta(ge=0)]]]


class BadSegment(Exception):
    """Not a segment, or none of ours."""


@dataclass(frozen=True, slots=True)
class SegmentForm:
    """What all segments of a tier have in common."""

    layout_digest: str
    page_bytes: int
    num_heads: int

    def data_bytes(self, num_pages: int) -> int:
        return aligned(num_pages * self.page_bytes)

    def num_bytes(self, num_pages: int) -> int:
        """At most, of a segment with so many pages."""
        per_page = _INDEX_BYTES_PER_PAGE + 9 * self.num_heads
        return self.data_bytes(num_pages) + aligned(_INDEX_BYTES + num_pages * per_page)

    def max_pages(self, num_bytes: int) -> int:
        """That fit into `num_bytes`; 0 if none does."""
        num_pages = num_bytes // self.page_bytes
        while num_pages and self.num_bytes(num_pages) > num_bytes:
            num_pages -= 1
        return num_pages

    def seal(self, buffer: memoryview, names: list[PageName], checksums: CellSums) -> memoryview:
        """Writes index and trailer behind the pages in `buffer`; returns the whole segment."""
        index = msgspec.msgpack.encode(
            SegmentIndex(
                layout_digest=self.layout_digest,
                page_bytes=self.page_bytes,
                keys=b"".join(name.key for name in names),
                groups=[name.group for name in names],
                checksums=checksums.tolist(),
            )
        )
        start = self.data_bytes(len(names))
        end = aligned(start + len(index) + TRAILER.size)
        buffer[start : start + len(index)] = index
        digest = hashlib.sha256(index).digest()
        buffer[end - TRAILER.size : end] = TRAILER.pack(MAGIC, start, len(index), digest)
        return buffer[:end]

    def index_place(self, tail: bytes, num_bytes: int) -> tuple[int, int]:
        """Offset and length of the index, from the last bytes of a segment of `num_bytes`.

        Raises BadSegment."""
        magic, start, length, _ = _trailer(tail)
        if magic != MAGIC or start % ALIGNMENT or start + length + TRAILER.size > num_bytes:
            raise BadSegment("there is no trailer")
        return start, length

    def read_index(self, raw: bytes, tail: bytes) -> tuple[list[PageName], CellSums]:
        """Raises BadSegment: a torn index, pages of another form, or more than there can be."""
        _, start, _, digest = _trailer(tail)
        if hashlib.sha256(raw).digest() != digest:
            raise BadSegment("the index is not what was written")
        try:
            index = msgspec.msgpack.decode(raw, type=SegmentIndex)
        except msgspec.DecodeError as error:
            raise BadSegment(f"the index is of another version: {error}") from None
        if (index.layout_digest, index.page_bytes) != (self.layout_digest, self.page_bytes):
            raise BadSegment("the pages are of another layout")
        num_pages = len(index.groups)
        if num_pages * self.page_bytes > start or num_pages >= MAX_PLACES:
            raise BadSegment(f"it has no room for {num_pages} pages")
        if len(index.keys) != num_pages * KEY_BYTES or len(index.checksums) != num_pages:
            raise BadSegment(f"there are not as many keys or checksums as pages, {num_pages}")
        if any(len(sums) != self.num_heads for sums in index.checksums):
            raise BadSegment(f"not every page has checksums of {self.num_heads} heads")
        keys = [index.keys[i : i + KEY_BYTES] for i in range(0, len(index.keys), KEY_BYTES)]
        names = [PageName(key, group) for key, group in zip(keys, index.groups, strict=True)]
        return names, np.array(index.checksums, np.uint64).reshape(-1, self.num_heads)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def new_buffer(num_bytes: int) -> memoryview:
    """Aligned, as reads and writes past the page cache need it, and all there: no copy faults."""
    mapping = mmap.mmap(-1, aligned(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages, or an older one
        mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping.madvise(_MADV_POPULATE_WRITE)
    return memoryview(mapping)


def _trailer(tail: bytes) -> tuple[bytes, int, int, bytes]:
    if len(tail) < TRAILER.size:
        raise BadSegment("it is too short")
    magic, start, length, digest = TRAILER.unpack(tail[-TRAILER.size :])
    return magic, start, length, digest
