import asyncio
from collections.abc import Callable

import pytest

from paceline.core.errors import Overloaded, Unavailable
from paceline.router.admission import AdmissionQueue


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
    order = queue.next_order(priority)
    return asyncio.create_task(queue.wait(group, order, room.place(name), num_tokens))


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
        queue.check_room(1)
    assert refused.value.retry_after_s is not None and 1 <= refused.value.retry_after_s <= 60
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    queue.check_room(1)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert len(queue) == 0


async def test_long_prompts_fill_the_queue_sooner_and_an_empty_one_takes_any() -> None:
    queue, room = AdmissionQueue[_Slot](8, 1000), _Room(0)
    queue.check_room(5000)
    tasks = [_wait(queue, room, name, num_tokens=450) for name in "ab"]
    await asyncio.sleep(0)
    queue.check_room(100)
    with pytest.raises(Overloaded, match="2 requests with 900 tokens are waiting"):
        queue.check_room(101)
    room.free = 1
    queue.wake()
    queue.check_room(550)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    queue.check_room(5000)


async def test_groups_do_not_wait_for_each_other() -> None:
    queue, none, some = AdmissionQueue[_Slot](4, 1000), _Room(0), _Room(1)
    blocked = _wait(queue, none, "a", group="x")
    await asyncio.sleep(0)
    assert await _wait(queue, some, "b", group="y")
    blocked.cancel()


async def test_one_that_gives_up_lets_the_next_go() -> None:
    queue, room = AdmissionQueue[_Slot](4, 1000), _Room(0)
    large = asyncio.create_task(queue.wait("m", queue.next_order(0), lambda: None, 1))
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

    first = asyncio.create_task(queue.wait("m", queue.next_order(0), place, 1))
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
