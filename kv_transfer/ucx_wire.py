"""What ucx's source and reader tell each other of UCX, inside the hellos of tcp_wire."""

import msgspec

_MAX_PIECES = 1 << 24  # then tags start again
_MAX_PARTS = 1 << 16


class UcxEndpoint(msgspec.Struct, frozen=True, array_like=True):
    address: bytes  # of the UCX worker
    channel: int  # of the reader's own choice: unique among its connections


def first_tag(channel: int, piece: int) -> int:
    """Tag of the first part of a connection's `piece`-th piece; the next parts count on."""
    return (channel * _MAX_PIECES + piece % _MAX_PIECES) * _MAX_PARTS
