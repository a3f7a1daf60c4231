"""Millions of prefixes that are never seen again: memory of this process, and time of a lookup."""

import gc
import os
import statistics
import time

import psutil
import pytest

from paceline.router.index import PrefixIndex

MIB = 1 << 20


def _rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_dynamo_10774_two_million_random_prefixes_leave_nothing() -> None:
    """https://github.com/ai-dynamo/dynamo/issues/10774: memory climbs until OOM."""
    index = PrefixIndex(2 * MIB)
    view = index.open()
    baseline, used = _rss(), []
    for _ in range(200):
        for _ in range(10):
            index.store(view, os.urandom(16 * 32 * 1000))
        assert len(index) <= index.max_keys < 70_000
        used.append(_rss())
    last = used[100:]
    assert max(last) - min(last) < MIB
    index.retire(view)
    for _ in index.sweep():
        pass
    assert len(index) == index.num_bytes == 0
    assert _rss() <= 1.2 * baseline


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_production_stack_687_two_hours_of_unique_documents_fit_512_mib() -> None:
    """https://github.com/vllm-project/production-stack/issues/687: OOM-killed every two hours.

    8192 tokens each, 20 a second: 144,000 documents, as fast as they go.
    """
    index = PrefixIndex(256 * MIB)  # the default
    view = index.open()
    baseline, times = _rss(), []
    for number in range(144_000):
        packed = os.urandom(16 * 512)
        if number % 100 == 0:
            began = time.perf_counter()
            assert index.match(packed) == {}
            times.append(time.perf_counter() - began)
            known = packed
        index.store(view, packed)
        if number % 100 == 99:
            began = time.perf_counter()
            assert index.match(known) == {view: 512}
            times.append(time.perf_counter() - began)
    assert index.num_bytes <= 256 * MIB
    assert _rss() - baseline <= 300 * MIB
    assert statistics.quantiles(times, n=100)[98] < 5e-3
