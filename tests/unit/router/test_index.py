"""The index over both of its tables, the compiled one and the reference."""

import functools
import operator
import os
import random
import statistics
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.keys import chain_keys, root_key, tenant_salt
from paceline.router import _native, index_reference
from paceline.router import index as index_module
from paceline.router.index import PrefixIndex
from paceline.rpc.redis_schema import Digest

_CHAIN = [key[:16] for key in chain_keys(bytes(32), list(range(160)))]
_LEAST_BYTES = 2 << 20


@pytest.fixture(params=[_native, index_reference], ids=["compiled", "reference"], autouse=True)
def _table(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "BlockTable", request.param.BlockTable)
        yield


def _pack(keys: list[bytes]) -> bytes:
    return b"".join(keys)


def _digest_of(keys: set[bytes]) -> Digest:
    return Digest(len(keys), functools.reduce(operator.xor, map(int.from_bytes, keys), 0))


def test_leading_blocks_count_and_holes_end_them() -> None:
    index = PrefixIndex(_LEAST_BYTES)
    whole, half, holed, other = (index.open() for _ in range(4))
    index.store(whole, _pack(_CHAIN))
    index.store(half, _pack(_CHAIN[:5]))
    index.store(holed, _pack(_CHAIN[:2] + _CHAIN[3:]))
    index.store(other, _pack(_CHAIN[1:]))
    assert index.match(_pack(_CHAIN), 16) == {whole: 10, half: 5, holed: 2}
    assert index.match(_pack(_CHAIN[:4]), 16) == {whole: 4, half: 4, holed: 2}
    assert index.match(b"", 16) == {}


def test_full_block_keys_are_matched_by_their_first_half() -> None:
    keys = chain_keys(root_key("ab" * 32, tenant_salt(b"s", "t")), list(range(64)))
    index = PrefixIndex(_LEAST_BYTES)
    view = index.open()
    index.store(view, b"".join(key[:16] for key in keys))
    assert index.match(b"".join(keys), 32) == {view: 4}


def test_a_retired_view_counts_no_more_and_its_bit_is_used_again_once_swept() -> None:
    index = PrefixIndex(_LEAST_BYTES)
    first = index.open()
    index.store(first, _pack(_CHAIN))
    index.retire(first)
    assert index.match(_pack(_CHAIN), 16) == {}
    second = index.open()
    assert second != first, "not swept yet"
    index.store(second, _pack(_CHAIN[:3]))
    for _ in index.sweep():
        assert index.match(_pack(_CHAIN), 16) == {second: 3}
    assert len(index) == 3
    third = index.open()
    assert third == first
    assert index.match(_pack(_CHAIN), 16) == {second: 3}


def test_a_sweep_that_another_overtakes_frees_no_view_that_was_opened_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_module, "_ALL_VIEWS", 0b111)
    index = PrefixIndex(_LEAST_BYTES)
    views = [index.open() for _ in range(3)]
    keys = [bytes([shard]) * 16 for shard in range(256)]
    index.store(views[0], _pack(keys))
    index.retire(views[0])
    housekeeping = index.sweep()
    for _ in range(10):
        next(housekeeping)
    index.retire(views[1])  # waits for the next sweep
    first = index.open()  # no bit is free: the sweep is brought to its end
    index.store(first, _pack(keys))
    second = index.open()
    index.store(second, _pack(keys))
    for _ in housekeeping:
        pass
    assert len({first, second, views[2]}) == 3
    for key in keys:
        assert index.match(key) == {first: 1, second: 1}
    assert index.digest(first) == index.digest(second) == _digest_of(set(keys))


_OPERATIONS = st.lists(
    st.tuples(st.sampled_from(("store", "remove", "retire")), st.integers(0, 2), st.integers(0, 9)),
    max_size=40,
)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_OPERATIONS)
def test_it_says_what_plain_sets_say(operations: list[tuple[str, int, int]]) -> None:
    index = PrefixIndex(_LEAST_BYTES)
    views = [index.open() for _ in range(3)]
    sets: list[set[bytes]] = [set(), set(), set()]
    for kind, worker, block in operations:
        if kind == "store":
            index.store(views[worker], _CHAIN[block])
            sets[worker].add(_CHAIN[block])
        elif kind == "remove":
            index.remove(views[worker], _CHAIN[block])
            sets[worker].discard(_CHAIN[block])
        else:
            index.retire(views[worker])
            views[worker], sets[worker] = index.open(), set()
    expected = {}
    for view, keys in zip(views, sets, strict=True):
        assert index.digest(view) == _digest_of(keys)
    for view, keys in zip(views, sets, strict=True):
        depth = next((i for i, key in enumerate(_CHAIN) if key not in keys), len(_CHAIN))
        if depth:
            expected[view] = depth
    assert index.match(_pack(_CHAIN), 16) == expected
    for _ in index.sweep():
        pass
    assert index.match(_pack(_CHAIN), 16) == expected
    assert len(index) == len(set().union(*sets))


def test_any_number_of_views_share_a_table() -> None:
    """The table has a bit for 64 of them an entry."""
    index = PrefixIndex(_LEAST_BYTES)
    views = [index.open() for _ in range(300)]
    for view in views:
        index.store(view, _pack(_CHAIN[: 1 + view % 10]))
    assert index.match(_pack(_CHAIN), 16) == {view: 1 + view % 10 for view in views}
    for view in views[:299]:
        index.retire(view)
    for _ in index.sweep():
        pass
    assert len(index) == 1 + 299 % 10
    assert index.match(_pack(_CHAIN), 16) == {299: 10}


def test_dynamo_10774_random_prefixes_stay_within_the_bound() -> None:
    """https://github.com/ai-dynamo/dynamo/issues/10774: memory climbs until OOM (scaled)."""
    index = PrefixIndex(_LEAST_BYTES)
    view = index.open()
    used = []
    for _ in range(30):
        index.store(view, os.urandom(16 * 32 * 250))
        used.append(index.num_bytes)
        assert len(index) <= index.max_keys
    assert max(used) <= min(_LEAST_BYTES, 1.2 * statistics.median(used[15:]))
    assert index.digest(view) is None, "what it forgot would be missing"
    index.retire(view)
    for _ in index.sweep():
        pass
    assert len(index) == index.num_bytes == 0


def test_production_stack_687_what_is_used_survives_a_stream_of_unique_documents() -> None:
    """https://github.com/vllm-project/production-stack/issues/687: unbounded trie (scaled)."""
    index = PrefixIndex(_LEAST_BYTES)
    view = index.open()
    index.store(view, _pack(_CHAIN))
    for _ in range(400):
        index.store(view, os.urandom(16 * 512))
        assert index.match(_pack(_CHAIN), 16) == {view: 10}
    assert len(index) <= index.max_keys < 400 * 512


def test_a_lookup_of_512_keys_on_3_workers_takes_a_fraction_of_a_millisecond() -> None:
    index = PrefixIndex(64 << 20)
    rng = random.Random(0)
    keys = rng.randbytes(32 * 512)
    for _ in range(3):
        view = index.open()
        index.store(view, b"".join(keys[i : i + 16] for i in range(0, len(keys), 32)))
        index.store(view, rng.randbytes(16 * 20_000))
    times = []
    for _ in range(50):
        started = time.perf_counter()
        index.match(keys, 32)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.3e-3


def test_the_longest_prompts_are_walked_to_their_ends() -> None:
    index = PrefixIndex(64 << 20)
    num_blocks = 65_536  # a million tokens
    keys = random.Random(0).randbytes(16 * num_blocks)
    depths = [num_blocks, 50_000, 2_100, 100]
    views = [index.open() for _ in depths]
    for view, depth in zip(views, depths, strict=True):
        index.store(view, keys[: 16 * depth])
    assert index.match(keys, 16) == dict(zip(views, depths, strict=True))
