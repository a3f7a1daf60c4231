"""Which page a full tier gives up."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.kv_transfer.tiers.base import PageName
from paceline.kv_transfer.tiers.eviction import POLICIES, Arc, EvictionPolicy, Lru

NUM_PLACES = 5


def name(number: int) -> PageName:
    return PageName(number.to_bytes(32, "big"), 0)


def visit(policy: EvictionPolicy, held: set[int], number: int, num_places: int) -> bool:
    """As a tier does: whether it was a hit."""
    if number in held:
        policy.touch(name(number))
        return True
    if len(held) == num_places:
        victim = policy.evict(lambda _: True)
        assert victim is not None
        held.remove(int.from_bytes(victim.key, "big"))
    policy.add(name(number))
    held.add(number)
    return False


class PolicyMachine(RuleBasedStateMachine):
    """Holds exactly what was added and not given up, and gives up nothing that is in use."""

    make: type[Lru] | type[Arc]

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.make(NUM_PLACES)
        self.held: set[int] = set()

    @rule(number=st.integers(0, 12))
    def visits(self, number: int) -> None:
        visit(self.policy, self.held, number, NUM_PLACES)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def removes(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        self.policy.remove(name(number))
        self.held.remove(number)

    @rule(used=st.sets(st.integers(0, 12)))
    def evicts(self, used: set[int]) -> None:
        victim = self.policy.evict(lambda n: int.from_bytes(n.key, "big") not in used)
        assert (victim is None) == (self.held <= used)
        if victim is not None:
            number = int.from_bytes(victim.key, "big")
            assert number in self.held - used
            self.held.remove(number)

    @invariant()
    def ghosts_are_bounded(self) -> None:
        if isinstance(self.policy, Arc):
            ghosts = len(self.policy._once_ghosts) + len(self.policy._again_ghosts)
            assert ghosts <= NUM_PLACES
            assert 0 <= self.policy._target <= NUM_PLACES


class LruMachine(PolicyMachine):
    make = Lru


class ArcMachine(PolicyMachine):
    make = Arc


TestLru = LruMachine.TestCase
TestArc = ArcMachine.TestCase
TestLru.settings = TestArc.settings = settings(max_examples=20, stateful_step_count=20)


def test_lru_gives_up_what_was_used_longest_ago() -> None:
    policy = Lru(3)
    for number in (1, 2, 3):
        policy.add(name(number))
    policy.touch(name(1))
    assert [policy.evict(lambda _: True) for _ in range(4)] == [name(2), name(3), name(1), None]


@pytest.mark.parametrize(("kind", "survive"), [("lru", False), ("arc", True)])
def test_a_scan_of_new_pages_flushes_lru_but_not_arc(kind: str, survive: bool) -> None:
    policy, held = POLICIES[kind](20), set[int]()
    for _ in range(3):
        for number in range(10):
            visit(policy, held, number, 20)
    for number in range(100, 200):
        visit(policy, held, number, 20)
    assert (set(range(10)) <= held) is survive


def test_arc_adapts_to_pages_that_come_back_too_late() -> None:
    """A loop over a little more than the tier holds: LRU never hits."""
    hits = {}
    for kind in POLICIES:
        policy, held = POLICIES[kind](20), set[int]()
        for number in range(5):  # a few that are used all the time
            visit(policy, held, number, 20)
        hits[kind] = sum(
            visit(policy, held, number, 20)
            for turn in range(30)
            for number in [*range(5), *range(100 + 22 * (turn % 3), 122 + 22 * (turn % 3))]
        )
    assert hits["arc"] >= 100 > hits["lru"]
