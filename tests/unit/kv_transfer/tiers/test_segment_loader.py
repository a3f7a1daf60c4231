"""Objects that look like segments and are none: they are deleted, and keep nobody from starting."""

import hashlib
from typing import Any

import msgspec
import pytest

from paceline.kv_transfer.tiers.segment_books import MAX_NUMBER
from paceline.kv_transfer.tiers.segment_format import MAGIC, TRAILER, SegmentIndex, aligned
from tests.contract.pools import SMALL
from tests.contract.tiers import LAYOUT, Bench, make_segment_tier, page_name
from tests.unit.kv_transfer.tiers.media import MemoryMedium

SUMS = [1] * SMALL.num_heads
RIGHT: dict[str, Any] = {
    "layout_digest": LAYOUT,
    "page_bytes": SMALL.page_bytes,
    "keys": page_name(1).key + page_name(2).key,
    "groups": [0, 0],
    "checksums": [SUMS, SUMS],
}


def segment_of(index: dict[str, Any]) -> bytes:
    """Room for two pages, and an index whose hash is right."""
    raw = msgspec.msgpack.encode([index[field] for field in SegmentIndex.__struct_fields__])
    start = aligned(2 * SMALL.page_bytes)
    end = aligned(start + len(raw) + TRAILER.size)
    trailer = TRAILER.pack(MAGIC, start, len(raw), hashlib.sha256(raw).digest())
    padding = bytes(end - start - len(raw) - TRAILER.size)
    return bytes(start) + raw + padding + trailer


def held_by(medium: MemoryMedium) -> int:
    bench = Bench([make_segment_tier(medium, 12, segment_pages=4)])
    bench.put(50)
    assert bench.pull(50) == [50]
    bench.check()
    bench.stack.close()
    return bench.tiers[0].figures.num_pages - 1


@pytest.mark.parametrize(
    "change",
    [
        {"groups": [0]},
        {"groups": [0, 0, 0]},
        {"groups": "00"},
        {"keys": RIGHT["keys"][:-1]},
        {"checksums": [SUMS]},
        {"checksums": [SUMS, [*SUMS, 1]]},
        {"checksums": [[], [*SUMS, *SUMS]]},
        {"checksums": [[-1] * SMALL.num_heads, SUMS]},
        {"keys": bytes(32 * 999), "groups": [0] * 999, "checksums": [SUMS] * 999},
        {"page_bytes": 8, "keys": b"", "groups": [], "checksums": []},
    ],
)
def test_an_index_that_cannot_be_is_deleted(change: dict[str, Any]) -> None:
    medium = MemoryMedium(objects={7: segment_of({**RIGHT, **change})})
    assert held_by(medium) == 0
    assert 7 not in medium.objects


@pytest.mark.parametrize(("number", "num_held"), [(7, 2), (MAX_NUMBER, 2), (MAX_NUMBER + 1, 0)])
def test_a_number_is_one_of_ours(number: int, num_held: int) -> None:
    medium = MemoryMedium(objects={number: segment_of(RIGHT)})
    assert held_by(medium) == num_held
    assert (number in medium.objects) is (num_held == 2)
