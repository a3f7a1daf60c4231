"""The compiled table of the index: its memory, and what it refuses."""

import os

import pytest

from paceline.router import _native

_LEAST_BYTES = 2 << 20


def test_entries_take_at_most_64_bytes_each() -> None:
    """At every size that the table grows through."""
    table = _native.BlockTable(64 << 20)
    for num_keys in range(20_000, 400_000, 20_000):
        table.store(0, os.urandom(16 * 20_000))
        assert len(table) == num_keys and table.num_bytes <= 64 * num_keys


def test_what_is_no_view_or_no_mask_is_refused() -> None:
    table = _native.BlockTable(_LEAST_BYTES)
    with pytest.raises(ValueError, match="view=16384"):
        table.store(1 << 14, bytes(16))
    with pytest.raises(ValueError, match="stride=8"):
        table.match(bytes(16), 8, b"")
    with pytest.raises(ValueError, match="4096 bytes of masks"):
        table.match(bytes(16), 16, bytes(4096))
    with pytest.raises(ValueError, match="max_bytes=1000"):
        _native.BlockTable(1000)
