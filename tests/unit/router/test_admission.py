import asyncio
from collections.abc import Callable

import pytest

from paceline.core.errors import Overloaded, Unavailable
from paceline.router.admission import AdmissionQueue
from paceline.router.lineup import Turn


class _Slot:
    """One of a few; `close` gives it back."""

    def __init__(self, room: "_Room") -> None:
        self._room = room

    def close(self) -> None:
        self._room.free += 1


class _Room:
    def __init__(self, free: int) -> None:
        self.free = free
        self.taken: list[str] = []

    def place(self, name: str) -> Callable[[], _Slot | None]:
        def place() -> _Slot | None:
            if not self.free:
                return None
            self.free -= 1
            self.taken.append(name)
            return _Slot(self)

        return place


def _wait(
    queue: AdmissionQueue[_Slot],
    room: _Room,
    name: str,
    priority: int = 0,
    group: str = "m",
    num_tokens: int = 100,
) -> asyncio.Task[_Slot]:
    turn = _turn(queue, priority, num_tokens)
    return asyncio.create_task(queue.wait(group, turn, room.place(name)))


def _turn(
    queue: AdmissionQueue[_Slot], priority: int = 0, num_tokens: int = 1, tenant: str = "t"
) -> Turn:
    return Turn(priority, tenant, 1.0, 10.0, queue.next_arrival(), num_tokens)


async def test_whoever_finds_room_does_not_wait() -> None:
    queue, room = AdmissionQueue[_Slot](4, 1000), _Room(1)
    assert await _wait(queue, room, "a")
    assert len(queue) == 0


async def test_priority_then_arrival_decide_who_is_next() -> None:
    queue, room = AdmissionQueue[_Slot](8, 1000), _Room(0)
    tasks = [_wait(queue, room, *args) for args in (("a", 1), ("b", 1), ("c", 0), ("d", 2))]
    await asyncio.sleep(0)
    assert len(queue) == 4
    room.free = 3
    queue.wake()
    assert room.taken == ["c", "a", "b"] and len(queue) == 1
    room.free = 1
    queue.wake()
    await asyncio.gather(*tasks)
    assert room.taken[-1] == "d" and len(queue) == 0


async def test_a_full_queue_says_when_to_come_back() -> None:
    queue, room = AdmissionQueue[_Slot](2, 1000), _Room(0)
    tasks = [_wait(queue, room, name) for name in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="2 requests with 200 tokens are waiting") as refused:
        queue.make_room(_turn(queue, num_tokens=1))
    assert refused.value.retry_after_s is not None and 1 <= refused.value.retry_after_s <= 60
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    queue.make_room(_turn(queue, num_tokens=1))
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert len(queue) == 0


async def test_long_prompts_fill_the_queue_sooner_and_an_empty_one_takes_any() -> None:
    queue, room = AdmissionQueue[_Slot](8, 1000), _Room(0)
    queue.make_room(_turn(queue, num_tokens=5000))
    tasks = [_wait(queue, room, name, num_tokens=450) for name in "ab"]
    await asyncio.sleep(0)
    queue.make_room(_turn(queue, num_tokens=100))
    with pytest.raises(Overloaded, match="2 requests with 900 tokens are waiting"):
        queue.make_room(_turn(queue, num_tokens=101))
    room.free = 1
    queue.wake()
    queue.make_room(_turn(queue, num_tokens=550))
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    queue.make_room(_turn(queue, num_tokens=5000))


async def test_groups_do_not_wait_for_each_other() -> None:
    queue, none, some = AdmissionQueue[_Slot](4, 1000), _Room(0), _Room(1)
    blocked = _wait(queue, none, "a", group="x")
    await asyncio.sleep(0)
    assert await _wait(queue, some, "b", group="y")
    blocked.cancel()


async def test_one_that_gives_up_lets_the_next_go() -> None:
    queue, room = AdmissionQueue[_Slot](4, 1000), _Room(0)
    large = asyncio.create_task(queue.wait("m", _turn(queue), lambda: None))
    small = _wait(queue, room, "small")
    await asyncio.sleep(0)
    room.free = 1
    queue.wake()
    assert room.taken == []
    large.cancel()
    assert await small and len(queue) == 0


async def test_an_error_ends_one_wait_only() -> None:
    queue, room = AdmissionQueue[_Slot](4, 1000), _Room(0)
    broken = False

    def place() -> None:
        if broken:
            raise Unavailable("nobody is left")

    first = asyncio.create_task(queue.wait("m", _turn(queue), place))
    second = _wait(queue, room, "b")
    await asyncio.sleep(0)
    broken, room.free = True, 1
    queue.wake()
    with pytest.raises(Unavailable):
        await first
    assert await second


@pytest.mark.parametrize("turns_between", [0, 1, 2, 3])
async def test_a_place_that_arrives_with_the_cancellation_is_given_back(turns_between: int) -> None:
    queue, room = AdmissionQueue[_Slot](4, 1000), _Room(0)
    task = _wait(queue, room, "a")
    await asyncio.sleep(0)
    room.free = 1
    queue.wake()
    for _ in range(turns_between):
        await asyncio.sleep(0)
    task.cancel()
    done = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(done, _Slot):
        done.close()
    assert room.free == 1 and len(queue) == 0


async def test_cancelled_before_the_wake_takes_nothing() -> None:
    queue, room = AdmissionQueue[_Slot](4, 1000), _Room(0)
    gone, stays = _wait(queue, room, "gone"), _wait(queue, room, "stays")
    await asyncio.sleep(0)
    gone.cancel()
    room.free = 1
    queue.wake()
    assert await stays
    assert room.taken == ["stays"] and len(queue) == 0


async def test_a_full_queue_is_shared_between_tenants() -> None:
    queue, room = AdmissionQueue[_Slot](4, 10_000), _Room(0)
    turns = [_turn(queue, tenant="many") for _ in range(4)]
    tasks = [asyncio.create_task(queue.wait("m", turn, room.place("many"))) for turn in turns]
    await asyncio.sleep(0)
    for _ in range(2):
        turn = _turn(queue, tenant="few")
        queue.make_room(turn)
        tasks.append(asyncio.create_task(queue.wait("m", turn, room.place("few"))))
        await asyncio.sleep(0)
    assert len(queue) == 4
    for task in tasks[2:4]:
        with pytest.raises(Overloaded, match="4 requests with"):
            await task
    with pytest.raises(Overloaded):
        queue.make_room(_turn(queue, tenant="few"))
    with pytest.raises(Overloaded):
        queue.make_room(_turn(queue, tenant="many"))
    room.free = 9
    queue.wake()
    await asyncio.gather(*tasks[:2], *tasks[4:])
    assert len(queue) == 0 and sorted(room.taken) == ["few", "few", "many", "many"]


async def test_a_higher_priority_takes_the_place_of_the_newest_of_a_lower_one() -> None:
    queue, room = AdmissionQueue[_Slot](2, 10_000), _Room(0)
    tasks = [_wait(queue, room, name, priority=5) for name in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        queue.make_room(_turn(queue, priority=6))
    queue.make_room(_turn(queue, priority=-1))
    with pytest.raises(Overloaded):
        await tasks[1]
    assert len(queue) == 1
    room.free = 1
    queue.wake()
    await tasks[0]


async def test_the_place_of_one_that_is_leaving_is_taken() -> None:
    """In the same turn of the loop: its task has not run since its client left."""
    queue, room = AdmissionQueue[_Slot](1, 10_000), _Room(0)
    leaving = _wait(queue, room, "leaving", priority=5)
    await asyncio.sleep(0)
    leaving.cancel()
    turn = _turn(queue)
    queue.make_room(turn)
    comes = asyncio.create_task(queue.wait("m", turn, room.place("comes")))
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert len(queue) == 1
    room.free = 1
    queue.wake()
    await comes
    assert room.taken == ["comes"] and len(queue) == 0


async def test_who_comes_back_keeps_its_place() -> None:
    """Its client may have tokens already."""
    queue, room = AdmissionQueue[_Slot](2, 10_000), _Room(0)
    back = _turn(queue, priority=5)
    tasks = [asyncio.create_task(queue.wait("m", back, room.place("back"), comes_back=True))]
    tasks.append(_wait(queue, room, "new", priority=5))
    await asyncio.sleep(0)
    queue.make_room(_turn(queue))
    with pytest.raises(Overloaded):
        await tasks[1]
    tasks[1] = _wait(queue, room, "high")
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        queue.make_room(_turn(queue, priority=-1, num_tokens=10_000))
    room.free = 2
    queue.wake()
    await asyncio.gather(*tasks)
    assert len(queue) == 0


async def test_one_that_takes_too_many_places_takes_none() -> None:
    """A long prompt for which nobody gives up enough."""
    queue, room = AdmissionQueue[_Slot](8, 1000), _Room(0)
    tasks = [_wait(queue, room, "low", priority=1), _wait(queue, room, "own", num_tokens=700)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        queue.make_room(_turn(queue, num_tokens=900))
    assert len(queue) == 2
    for task in tasks:
        task.cancel()
