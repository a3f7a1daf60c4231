"""Order of those that wait: priorities, tenants' shares, when they are due."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.router.lineup import BASE_TOKENS, Answer, Lineup, Turn

_arrivals = itertools.count()


@dataclass(eq=False)
class _Waiter:
    turn: Turn
    name: str = ""


def _waiter(
    name: str = "",
    tenant: str = "t",
    priority: int = 0,
    weight: float = 1.0,
    due: float = 10.0,
    num_tokens: int = 100,
) -> _Waiter:
    return _Waiter(Turn(priority, tenant, weight, due, next(_arrivals), num_tokens), name)


@dataclass
class _Room:
    """Answers with what is named, else places as many as there is room for."""

    free: int
    answers: dict[str, Answer] = field(default_factory=dict)
    placed: list[_Waiter] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [waiter.name for waiter in self.placed]

    def ask(self, waiter: _Waiter) -> Answer:
        self.asked.append(waiter.name)
        if waiter.name in self.answers:
            return self.answers[waiter.name]
        if len(self.placed) >= self.free:
            return Answer.NO_ROOM
        self.placed.append(waiter)
        return Answer.PLACED


def _lined_up(*waiters: _Waiter) -> Lineup[_Waiter]:
    lineup: Lineup[_Waiter] = Lineup()
    for waiter in waiters:
        lineup.push(waiter)
    return lineup


def test_earliest_due_goes_first_then_who_came_first() -> None:
    waiters = [_waiter("a"), _waiter("b", due=2.0), _waiter("c"), _waiter("d", due=5.0)]
    room = _Room(4)
    lineup = _lined_up(*waiters)
    lineup.serve(room.ask)
    assert room.names == ["b", "d", "a", "c"] and not lineup


def test_priorities_are_strict_between_tenants_too() -> None:
    waiters = [_waiter(f"low{i}", "x", priority=1, due=0.0) for i in range(3)]
    waiters += [_waiter(f"high{i}", "y", priority=-1) for i in range(3)]
    room = _Room(4)
    _lined_up(*waiters).serve(room.ask)
    assert room.names == ["high0", "high1", "high2", "low0"]


def test_a_tenant_gains_nothing_from_others_by_hurry() -> None:
    """All have had as much; the one whose requests are due at once came last."""
    waiters = [_waiter("a", "x"), _waiter("b", "y"), _waiter("c", "z", due=0.0)]
    room = _Room(3)
    _lined_up(*waiters).serve(room.ask)
    assert room.names == ["a", "b", "c"]


def test_tenants_share_by_weight_however_many_each_sends() -> None:
    waiters = [_waiter("", "many", weight=1.0, num_tokens=1000) for _ in range(400)]
    waiters += [_waiter("", "few", weight=3.0, num_tokens=1000) for _ in range(100)]
    room = _Room(80)
    _lined_up(*waiters).serve(room.ask)
    shares = Counter(waiter.turn.tenant for waiter in room.placed)
    assert abs(shares["few"] - 60) <= 1, shares


def test_long_prompts_count_for_more_than_short_ones() -> None:
    waiters = [_waiter("", "long", num_tokens=9 * (100 + BASE_TOKENS)) for _ in range(50)]
    waiters += [_waiter("", "short", num_tokens=100) for _ in range(50)]
    room = _Room(40)
    _lined_up(*waiters).serve(room.ask)
    tokens: Counter[str] = Counter()
    for waiter in room.placed:
        tokens[waiter.turn.tenant] += waiter.turn.num_tokens + BASE_TOKENS
    assert 0.7 < tokens["short"] / tokens["long"] < 1.4, tokens


def test_to_have_been_away_earns_nothing() -> None:
    lineup = _lined_up(*(_waiter("", "there") for _ in range(100)))
    room = _Room(60)
    lineup.serve(room.ask)
    for _ in range(100):
        lineup.push(_waiter("", "new"))
    room.free = 80
    lineup.serve(room.ask)
    shares = Counter(waiter.turn.tenant for waiter in room.placed[60:])
    assert abs(shares["new"] - 10) <= 1, shares


def test_who_comes_back_goes_first_and_does_not_pay_again() -> None:
    lineup = _lined_up(_waiter("a", "x", due=1.0), _waiter("b", "x", due=2.0))
    lineup.push(_waiter("back", "y", due=9.0), comes_back=True)
    lineup.push(_waiter("c", "y", due=9.0))
    room = _Room(3)
    lineup.serve(room.ask)
    assert room.names == ["back", "a", "c"]


def test_a_large_one_without_room_is_not_overtaken_within_its_priority() -> None:
    lineup = _lined_up(_waiter("large", due=1.0), _waiter("small", "other"), _waiter("low", "x", 1))
    room = _Room(5, {"large": Answer.NO_ROOM})
    lineup.serve(room.ask)
    assert room.names == [] and room.asked == ["large"]


_turns = st.builds(
    _waiter,
    tenant=st.sampled_from("abc"),
    priority=st.integers(-1, 1),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    due=st.floats(0, 20),
    num_tokens=st.integers(1, 5000),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(_turns, max_size=30), st.lists(st.sampled_from(list(Answer)), max_size=60), st.data()
)
def test_each_is_placed_once_or_stays_until_it_is_removed(
    waiters: list[_Waiter], answers: list[Answer], data: st.DataObject
) -> None:
    lineup, left = _lined_up(*waiters), set(map(id, waiters))
    given_answers = iter(answers)

    def ask(waiter: _Waiter) -> Answer:
        assert id(waiter) in left
        answer = next(given_answers, Answer.PLACED)
        if answer in (Answer.PLACED, Answer.GONE):
            left.discard(id(waiter))
        return answer

    lineup.serve(ask)
    for waiter in waiters:
        if id(waiter) in left and data.draw(st.booleans()):
            lineup.remove(waiter)
            left.discard(id(waiter))
    for _ in range(len(answers) + 1):
        lineup.serve(ask)
    assert not left and not lineup
