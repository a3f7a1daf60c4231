"""What both ends of a link must agree on before a byte is copied."""

from typing import TypeVar

import msgspec
import numpy as np

from paceline.core.errors import IncompatiblePeer, KvUnavailable
from paceline.kv_transfer.base import PageIds, Pool

T = TypeVar("T")


class Geometry(msgspec.Struct, frozen=True, array_like=True):
    """A pool's page format. `num_pages` is each end's own; all else must be equal."""

    num_pages: int
    group: str
    num_layers: int
    num_planes: int
    num_heads: int
    head_dim: int
    dtype: str
    page_tokens: int


def geometry_of(pool: Pool) -> Geometry:
    group = pool.group
    return Geometry(
        num_pages=pool.num_pages,
        group=group.name,
        num_layers=group.num_layers,
        num_planes=group.num_planes,
        num_heads=group.num_heads,
        head_dim=group.head_dim,
        dtype=group.dtype,
        page_tokens=group.page_tokens,
    )


def check_geometry(ours: Geometry, theirs: Geometry) -> None:
    """Raises IncompatiblePeer naming the first field that differs."""
    for field in Geometry.__struct_fields__:
        if field != "num_pages":
            check_equal(field, getattr(ours, field), getattr(theirs, field))


def check_equal(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise IncompatiblePeer(f"{field}: {ours!r} here, {theirs!r} at the source", field=field)


def check_source_pages(pages: PageIds, num_pages: int) -> None:
    """Raises KvUnavailable for a page that the source does not have."""
    if are_within(pages, num_pages):
        return
    outside = np.flatnonzero((pages < 0) | (pages >= num_pages))
    if len(outside):
        raise no_such_page(int(pages[outside[0]]), num_pages)


def are_within(pages: PageIds, num_pages: int) -> bool:
    """In one look at each: what is negative is a large number without a sign."""
    return not len(pages) or int(pages.view(np.uint64).max()) < num_pages


def check_destination_pages(pages: PageIds, num_pages: int) -> None:
    """Raises IndexError: the caller wants to write outside its own pool."""
    if are_within(pages, num_pages):
        return
    outside = np.flatnonzero((pages < 0) | (pages >= num_pages))
    if len(outside):
        raise IndexError(f"destination page {pages[outside[0]]}: the pool has {num_pages} pages")


def no_such_page(page: int, num_pages: int) -> KvUnavailable:
    message = f"page {page} does not exist: the source has {num_pages} pages"
    return KvUnavailable(message, field="source_pages")


def decode_peer(data: bytes, kind: type[T], what: str) -> T:
    """`data` from a peer as `kind`. Raises IncompatiblePeer: junk, or another version's."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise IncompatiblePeer(f"{what} cannot be read: {error}", field=what) from None
