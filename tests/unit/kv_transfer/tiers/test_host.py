"""The books of a host tier balance after any sequence of calls."""

import threading

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from paceline.kv_transfer.base import Piece
from paceline.kv_transfer.tiers.base import PageBatch, TierPin
from paceline.kv_transfer.tiers.host import HostTier
from tests.contract.pools import SMALL, pages_of
from tests.contract.tiers import Bench, page_name

NUM_PLACES = 5
numbers = st.lists(st.integers(0, 9), max_size=7)


class HostMachine(RuleBasedStateMachine):
    """Readers hold pins while pages come, are evicted, and are found to be wrong."""

    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier("host", SMALL, NUM_PLACES, "lru")
        self.bench = Bench([self.tier])
        self.num_pinned = 0

    @rule(chosen=numbers, wrong=st.sets(st.integers(0, 9)))
    def put(self, chosen: list[int], wrong: set[int]) -> None:
        batch = self.bench.batch(chosen)
        rows = [row for row, number in enumerate(chosen) if number in wrong]
        batch.checksums[rows, 0] += 1
        returned = self.tier.put(batch)
        assert set(returned.tolist()) <= set(rows)
        room = NUM_PLACES - self.num_pinned
        good = [number for number in dict.fromkeys(chosen) if number not in wrong]
        if not wrong and len(chosen) <= room:
            assert all(self.tier.holds(page_name(number)) for number in good)

    @rule(target=pins, chosen=st.sets(st.integers(0, 9), max_size=3))
    def pin(self, chosen: set[int]) -> tuple[list[int], TierPin]:
        asked = sorted(chosen)
        pin = self.tier.pin([page_name(number) for number in asked])
        found = [asked[row] for row in pin.rows.tolist()]
        assert found == [number for number in asked if self.tier.holds(page_name(number))]
        self.num_pinned += len(found)
        return found, pin

    @rule(held=pins)
    def read(self, held: tuple[list[int], TierPin]) -> None:
        found, pin = held
        to = np.arange(len(found))
        sums = self.tier.link(self.bench.pool, threading.Event()).read(Piece(pin.pages, to), 1)
        assert np.array_equal(sums, pin.checksums)
        assert np.array_equal(pages_of(self.bench.pool)[to], pages_of(self.bench.source)[found])

    @rule(held=pins, again=st.booleans())
    def report(self, held: tuple[list[int], TierPin], again: bool) -> None:
        for page, generation in zip(held[1].pages, held[1].generations, strict=True):
            for _ in range(1 + again):
                self.tier.report(int(page), int(generation))

    @rule(held=consumes(pins))
    def unpin(self, held: tuple[list[int], TierPin]) -> None:
        self.tier.unpin(held[1])
        self.num_pinned -= len(held[0])

    @rule(chosen=numbers)
    def touch(self, chosen: list[int]) -> None:
        self.tier.touch([page_name(number) for number in chosen])

    @invariant()
    def books_balance(self) -> None:
        self.bench.check()
        assert sum(self.tier._pins) == self.num_pinned
        named = {place for place, name in enumerate(self.tier._names) if name is not None}
        pinned = {place for place, pins in enumerate(self.tier._pins) if pins}
        free = self.tier._free
        assert len(free) == len(set(free)) and not set(free) & (named | pinned)
        assert len(free) + len(named | pinned) == NUM_PLACES


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_a_chain_is_evicted_from_its_end() -> None:
    """A prefix is found only from its beginning."""
    bench = Bench([HostTier("host", SMALL, 6, "lru")])
    bench.put(0, 1, 2, 3)
    bench.put(10, 11, 12, 13)
    assert bench.pull(0, 1, 2, 3) == [0, 1]
    bench.put(20, 21, 22)
    assert bench.pull(0, 1, 10, 11, 12, 13) == [0, 1, 10]


def test_what_it_holds_goes_down_when_it_closes() -> None:
    upper, lower = HostTier("host", SMALL, 8, "lru"), HostTier("lower", SMALL, 8, "lru")
    bench = Bench([upper, lower])
    bench.put(*range(6))
    assert lower.figures.num_pages == 0
    upper.close()
    assert lower.figures.num_pages == 6


def test_a_page_of_another_form_costs_no_place() -> None:
    tier = HostTier("host", SMALL, NUM_PLACES, "lru")
    bench = Bench([tier])
    batch = bench.batch([1, 2])
    beyond = PageBatch(batch.names, batch.memory, batch.pages + 64, batch.checksums)
    with pytest.raises(IndexError):
        tier.put(beyond)
    bench.put(*range(NUM_PLACES))
    assert bench.pull(*range(NUM_PLACES)) == list(range(NUM_PLACES))
    bench.check()
