"""One suite over all connectors: what kv_transfer/base.py promises."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

import numpy as np
import pytest

from paceline.core.errors import IncompatiblePeer, KvUnavailable, PacelineError, PeerGone
from paceline.kernels.checksum import sum_pages_reference
from paceline.kv_transfer import registry
from paceline.kv_transfer.base import Piece
from tests.contract.ends import SETTINGS, Ends, connected
from tests.contract.pools import LARGE, SMALL, edited, ids, make_pool, memory_of, pages_of


def test_scattered_pages_arrive_and_nothing_else_changes(ends: Ends) -> None:
    to, source_pages = ids(9, 0, 4, 11), ids(3, 10, 0, 7)
    sums = ends.link.read(Piece(source_pages, to), timeout_s=2)
    expected = np.full_like(pages_of(ends.pool), 0xFF)
    expected[to] = pages_of(ends.source_pool)[source_pages]
    assert np.array_equal(pages_of(ends.pool), expected)
    assert np.array_equal(
        sums, sum_pages_reference(memory_of(ends.source_pool), source_pages, SMALL)
    )


def test_the_whole_pool_arrives(ends: Ends) -> None:
    every = np.arange(ends.pool.num_pages)
    ends.link.read(Piece(every, every), timeout_s=2)
    assert np.array_equal(pages_of(ends.pool), pages_of(ends.source_pool))


@pytest.mark.parametrize("num_tokens", [1, 5, 15, 16])
def test_a_tail_brings_the_first_tokens_of_each_cell_only(ends: Ends, num_tokens: int) -> None:
    to, source_pages = ids(2, 3), ids(8, 1)
    sums = ends.link.read(Piece(source_pages, to, num_tokens), timeout_s=2)
    cells = (ends.pool.num_pages, -1, SMALL.cell_bytes)
    expected = np.full_like(pages_of(ends.pool), 0xFF).reshape(cells)
    used = SMALL.tail_bytes(num_tokens)
    expected[to, :, :used] = pages_of(ends.source_pool).reshape(cells)[source_pages, :, :used]
    assert np.array_equal(pages_of(ends.pool).reshape(cells), expected)
    memory = memory_of(ends.source_pool)
    assert np.array_equal(sums, sum_pages_reference(memory, source_pages, SMALL, num_tokens))


def test_pages_read_later_show_what_the_source_has_then(ends: Ends) -> None:
    ends.link.read(Piece(ids(5), ids(0)), timeout_s=2)
    with edited(ends.source_pool) as pages:
        pages[5] = 42
    ends.link.read(Piece(ids(5), ids(0)), timeout_s=2)
    assert (pages_of(ends.pool)[0] == 42).all()


def test_many_threads_read_at_once(ends: Ends) -> None:
    free = SimpleQueue[int]()  # like a pool, never the same destination for two at once
    for page in range(12):
        free.put(page)

    def read(turn: int) -> bool:
        page, source_pages = free.get(), np.random.default_rng(turn).integers(0, 12, 1)
        sums = ends.link.read(Piece(source_pages, ids(page)), timeout_s=10)
        free.put(page)
        return np.array_equal(
            sums, sum_pages_reference(memory_of(ends.source_pool), source_pages, SMALL)
        )

    with ThreadPoolExecutor(12) as threads:
        assert all(threads.map(read, range(240)))
    source_rows = {row.tobytes() for row in pages_of(ends.source_pool)}
    assert all(row.tobytes() in source_rows for row in pages_of(ends.pool))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "window"),
        ("num_layers", 3),
        ("num_planes", 1),
        ("num_heads", 1),
        ("head_dim", 16),
        ("dtype", "bfloat16"),
    ],
)
def test_a_pool_of_another_geometry_is_refused_by_name(
    ends: Ends, transport: str, field: str, value: object
) -> None:
    group = replace(SMALL, **{field: value})  # type: ignore[arg-type]
    reader = registry.make_reader(transport, make_pool(group, 4, None, transport), SETTINGS)
    with pytest.raises(IncompatiblePeer) as caught:
        reader.connect(ends.source.address(), timeout_s=2)
    assert caught.value.field == ("group" if field == "name" else field)
    assert repr(value) in caught.value.message


def test_pools_may_differ_in_size(transport: str) -> None:
    pools = make_pool(SMALL, 30, 2, transport), make_pool(SMALL, 4, None, transport)
    with connected(transport, *pools) as ends:
        ends.link.read(Piece(ids(29), ids(3)), timeout_s=2)
        assert np.array_equal(pages_of(ends.pool)[3], pages_of(ends.source_pool)[29])


@pytest.mark.parametrize("page", [-1, 12, 2**40])
def test_a_page_that_the_source_lacks_is_refused_and_the_link_stays(ends: Ends, page: int) -> None:
    with pytest.raises(KvUnavailable, match=f"page {page} does not exist") as caught:
        ends.link.read(Piece(ids(0, page), ids(0, 1)), timeout_s=2)
    assert caught.value.field == "source_pages"
    assert not isinstance(caught.value, PeerGone)
    ends.link.read(Piece(ids(0), ids(0)), timeout_s=2)


@pytest.mark.parametrize("page", [-1, 12])
def test_a_destination_outside_the_pool_is_our_bug(ends: Ends, page: int) -> None:
    with pytest.raises(IndexError, match=str(page)):
        ends.link.read(Piece(ids(0, 1), ids(0, page)), timeout_s=2)
    assert (pages_of(ends.pool) == 0xFF).all()
    ends.link.read(Piece(ids(0), ids(0)), timeout_s=2)


def test_a_closed_source_is_gone_at_once(ends: Ends) -> None:
    address = ends.source.address()
    ends.source.close()
    started = time.monotonic()
    with pytest.raises(PeerGone):
        ends.link.read(Piece(ids(0), ids(0)), timeout_s=10)
    with pytest.raises(PeerGone):
        ends.reader.connect(address, timeout_s=10)
    assert time.monotonic() - started < 0.5


def read_until_it_fails(ends: Ends, failures: list[PacelineError]) -> None:
    every = np.arange(ends.pool.num_pages)
    while True:
        try:
            ends.link.read(Piece(every, every), timeout_s=10)
        except PacelineError as error:
            failures.append(error)
            return


@pytest.mark.parametrize("who", ["source", "link"])
def test_closing_during_reads_ends_them_all(transport: str, who: str) -> None:
    pools = [make_pool(LARGE, 16, seed, transport) for seed in (3, None)]
    with connected(transport, *pools) as ends:
        failures: list[PacelineError] = []
        args = (ends, failures)
        threads = [threading.Thread(target=read_until_it_fails, args=args) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        started = time.monotonic()
        (ends.source if who == "source" else ends.link).close()
        for thread in threads:
            thread.join(timeout=5)
        assert time.monotonic() - started < 2
        assert [type(failure) for failure in failures] == [PeerGone] * 3


def test_closing_twice_is_harmless(ends: Ends) -> None:
    for _ in range(2):
        ends.link.close()
        ends.source.close()


@pytest.mark.parametrize("address", [b"", b"junk", b"\x80\x04\x95", bytes(300)])
def test_a_junk_address_is_refused(ends: Ends, address: bytes) -> None:
    with pytest.raises((IncompatiblePeer, PeerGone)):
        ends.reader.connect(address, timeout_s=2)
