"""Leases end when they should, not before, and give each page back once, in any order of calls."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.core.errors import Overloaded
from paceline.worker.leases import MAX_LEASE_S, HandoffKey, LeaseTable, PageLives, Reader

MAX_PAGES = 12
SILENCE_S = 6.0
readers = st.sampled_from([("reader", "1"), ("reader", "2"), ("other", "1")])
handoffs = st.sampled_from([("request", 0), ("request", 1), ("another", 0)])


@dataclass
class Held:
    """What a lease should be."""

    reader: Reader
    handoff: HandoffKey
    opened: float
    is_awaited: bool
    pages: PageLives = field(default_factory=list)
    num_unlisted: int = 0


class LeaseMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.table = LeaseTable(MAX_PAGES, SILENCE_S, lambda: self.now)
        self.held: dict[str, Held] = {}
        self.ended: list[str] = []
        self.heard: dict[Reader, float] = {}
        self.num_promised = self.num_lives = self.num_expired = 0

    def _ends(self, names: list[str]) -> PageLives:
        """Takes these out of the model; the pages that the table must give back."""
        self.ended += names
        return [page for name in names for page in self.held.pop(name).pages]

    @rule(num=st.integers(0, 5))
    def promise(self, num: int) -> None:
        if self.table.num_pages + self.num_promised + num > MAX_PAGES:
            with pytest.raises(Overloaded):
                self.table.promise(num)
        else:
            self.table.promise(num)
            self.num_promised += num

    @rule(num=st.integers(0, 5))
    def keep(self, num: int) -> None:
        num = min(num, self.num_promised)
        self.table.keep(num)
        self.num_promised -= num

    @rule(reader=readers, handoff=handoffs, is_awaited=st.booleans())
    def open(self, reader: Reader, handoff: HandoffKey, is_awaited: bool) -> None:
        name = self.table.open(reader, handoff, is_awaited=is_awaited)
        assert name not in self.held and name not in self.ended
        self.held[name] = Held(reader, handoff, self.now, is_awaited)
        self.heard[reader] = self.now

    @rule(data=st.data(), num=st.integers(0, 3))
    def add(self, data: st.DataObject, num: int) -> None:
        """To a lease that is held, or that has ended while its pages were being pinned."""
        if not (names := [*self.held, *self.ended[-3:]]):
            return
        name = data.draw(st.sampled_from(names))
        pages = [(i, self.num_lives + i) for i in range(num)]
        self.num_lives += num
        assert self.table.add(name, pages) is (name in self.held)
        if name in self.held:
            self.held[name].pages += pages

    @rule(data=st.data(), reader=readers)
    def release(self, data: st.DataObject, reader: Reader) -> None:
        """Its reader, another one, or again."""
        if names := [*self.held, *self.ended[-3:]]:
            name = data.draw(st.sampled_from(names))
            is_theirs = name in self.held and self.held[name].reader == reader
            expected = self._ends([name]) if is_theirs else []
            assert self.table.release(name, reader) == expected

    @rule(handoff=handoffs)
    def revoke(self, handoff: HandoffKey) -> None:
        names = [name for name, lease in self.held.items() if lease.handoff == handoff]
        assert self.table.revoke(handoff) == self._ends(names)

    @rule(data=st.data())
    def expect(self, data: st.DataObject) -> None:
        if self.held:
            name = data.draw(st.sampled_from(list(self.held)))
            self.table.expect(name)
            self.held[name].is_awaited = False

    @rule(data=st.data(), reader=readers)
    def beat(self, data: st.DataObject, reader: Reader) -> None:
        """It may list what is another's, or has ended."""
        names = [*self.held, *self.ended[-3:]]
        listed = set(data.draw(st.lists(st.sampled_from(names), max_size=4))) if names else set()
        self.heard[reader] = self.now
        for name, lease in self.held.items():
            if lease.reader == reader and name in listed:
                lease.num_unlisted, lease.is_awaited = 0, False
            elif lease.reader == reader and not lease.is_awaited:
                lease.num_unlisted += 1
        forgotten = [name for name, lease in self.held.items() if lease.num_unlisted == 2]
        expected = self._ends(forgotten)
        dropped, unknown = self.table.beat(reader, listed)
        assert dropped == expected
        theirs = {name for name, lease in self.held.items() if lease.reader == reader}
        assert set(unknown) == listed - theirs

    @rule(seconds=st.sampled_from([0.5, 2.0, SILENCE_S + 0.1, MAX_LEASE_S / 2]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        silent = {r for r, at in self.heard.items() if at < self.now - SILENCE_S}
        names = [
            name
            for name, lease in self.held.items()
            if lease.reader in silent or lease.opened < self.now - MAX_LEASE_S
        ]
        self.num_expired += len(names)
        assert self.table.sweep() == self._ends(names)
        for reader in silent:
            del self.heard[reader]

    @rule(reader=readers, ago=st.sampled_from([0.0, 3.0, 30.0]))
    def ask_for_silence(self, reader: Reader, ago: float) -> None:
        last = max(self.heard.get(reader, 0.0), self.now - ago)
        assert self.table.is_silent(reader, self.now - ago) is (self.now - last > SILENCE_S)

    @invariant()
    def counts_are_right(self) -> None:
        assert len(self.table) == len(self.held)
        assert self.table.num_pages == sum(len(lease.pages) for lease in self.held.values())
        assert self.table.num_expired == self.num_expired


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
