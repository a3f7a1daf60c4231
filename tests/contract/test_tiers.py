"""What every tier promises (kv_transfer/tiers/base.py)."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import Cancelled
from paceline.kv_transfer.base import Piece
from tests.contract.pools import pages_of
from tests.contract.tiers import KINDS, NUM_PLACES, Bench, TierKind, is_settled, page_name
from tests.support.waits import wait_for


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> TierKind:
    """Every tier of the product; a new one is added there and must pass the whole suite."""
    return KINDS[request.param]


@pytest.fixture
def bench(kind: TierKind, tmp_path: Path) -> Iterator[Bench]:
    made = Bench([kind.make(tmp_path)])
    yield made
    made.check()
    made.stack.close()


def test_what_was_put_comes_back_by_name(bench: Bench) -> None:
    assert bench.put(1, 2, 3) == []
    assert bench.pull(3, 9, 1) == [3, 1]
    assert bench.pull(9) == []


def test_a_name_is_key_and_page_group(bench: Bench) -> None:
    bench.put(1, group=0)
    bench.put(2, group=1)
    assert bench.pull(1, 2, group=1) == [2]
    assert bench.pull(1, 2, group=0) == [1]


def test_a_page_that_is_wrong_already_is_not_taken(bench: Bench) -> None:
    batch = bench.batch([1, 2, 3])
    batch.checksums[1, 0] += 1
    assert bench.stack.put(batch).tolist() == [1]
    bench.put(7)
    assert bench.pull(1, 2, 3, 7) == [1, 3, 7]
    assert bench.tiers[0].figures.num_mismatches == 1


def test_a_copy_that_went_bad_is_a_miss_and_deleted(bench: Bench, kind: TierKind) -> None:
    bench.put(1, 2, 3, 4)
    kind.spoil(bench.tiers[0], page_name(2))
    assert bench.pull(1, 2, 3, 4) == [1, 3, 4]
    assert not bench.tiers[0].holds(page_name(2))
    assert bench.tiers[0].figures.num_mismatches == 1
    bench.put(2)
    assert bench.pull(2) == [2]


def test_it_never_holds_more_than_its_capacity(bench: Bench, kind: TierKind) -> None:
    for number in range(40):
        bench.put(number)
        assert bench.tiers[0].figures.num_pages <= NUM_PLACES + kind.num_staged
    figures = bench.tiers[0].figures
    wait_for(lambda: figures.num_pages <= NUM_PLACES)
    assert figures.num_evictions == 40 - figures.num_pages
    assert figures.num_dropped == 0
    assert 39 in bench.pull(*range(28, 40))


def test_pinned_pages_stay_readable_while_others_push_them_out(bench: Bench) -> None:
    bench.put(1, 2)
    tier = bench.tiers[0]
    pin = tier.pin([page_name(2), page_name(50), page_name(1)])
    assert pin.rows.tolist() == [0, 2]
    for number in range(3, 40):
        bench.put(number)
    sums = tier.link(bench.pool, threading.Event()).read(Piece(pin.pages, np.array([5, 6])), 5)
    assert np.array_equal(sums, pin.checksums)
    assert np.array_equal(pages_of(bench.pool)[5:7], pages_of(bench.source)[[2, 1]])
    tier.unpin(pin)


def test_putting_what_is_there_changes_nothing(bench: Bench) -> None:
    bench.put(1, 2)
    bench.put(2, 1, 1)
    assert bench.tiers[0].figures.num_pages == bench.tiers[0].figures.num_stored == 2


def test_a_pull_that_is_cancelled_or_late_ends(bench: Bench) -> None:
    bench.put(1)
    names, to = [page_name(1)], np.array([0])
    cancelled = threading.Event()
    assert bench.stack.pull(names, bench.pool, to, time.monotonic() - 1, cancelled) == {}
    cancelled.set()
    with pytest.raises(Cancelled):
        bench.stack.pull(names, bench.pool, to, time.monotonic() + 5, cancelled)


@pytest.mark.parametrize("below", sorted(KINDS))
def test_what_is_evicted_goes_down_and_comes_back_from_there(
    kind: TierKind, below: str, tmp_path: Path
) -> None:
    first, second = kind.make(tmp_path / "first"), KINDS[below].make(tmp_path / "second")
    second.name = "second"
    bench = Bench([first, second])
    for number in range(NUM_PLACES + 6):
        bench.put(number)
        wait_for(lambda: all(map(is_settled, bench.tiers)))  # else the one below may drop pages
    wait_for(lambda: first.figures.num_pages <= NUM_PLACES)
    wait_for(lambda: first.figures.num_pages + second.figures.num_pages == NUM_PLACES + 6)
    everything = list(range(NUM_PLACES + 6))
    assert bench.pull(*everything) == everything
    assert second.figures.num_hits == second.figures.num_pages > 0
    bench.check()
    bench.stack.close()


def test_threads_that_put_and_pull_see_right_bytes_only(bench: Bench) -> None:
    stop, problems = threading.Event(), []

    def put(seed: int) -> None:
        chosen = random.Random(seed)
        while not stop.is_set():
            bench.stack.put(bench.batch([chosen.randrange(30) for _ in range(4)]))

    def pull(seed: int) -> None:
        chosen = random.Random(seed)
        while not stop.is_set():
            numbers = [chosen.randrange(30) for _ in range(4)]
            to = np.arange(4) + 4 * seed
            names = [page_name(number) for number in numbers]
            came = bench.stack.pull(names, bench.pool, to, time.monotonic() + 5, threading.Event())
            for row in came:
                expected = pages_of(bench.source)[numbers[row]]
                if not np.array_equal(pages_of(bench.pool)[to[row]], expected):
                    problems.append(numbers[row])

    threads = [threading.Thread(target=put, args=(i,)) for i in range(2)]
    threads += [threading.Thread(target=pull, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.15)
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not problems
    assert bench.tiers[0].figures.num_hits > 0
    assert bench.tiers[0].figures.num_mismatches == 0
