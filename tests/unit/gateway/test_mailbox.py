"""Emissions between the router's reader and the task of a response: in order, none twice."""

import asyncio

import pytest

from paceline.core.errors import Overloaded
from paceline.gateway.mailbox import Mailbox
from paceline.v1.common_pb2 import Emission, PositionLogprobs, PromptLogprobs

MAX_BYTES = 1000


def emission(position: int) -> Emission:
    return Emission(slot=1, position=position, token_ids=[7])


def positions(emissions: list[Emission]) -> list[int]:
    return [emission.position for emission in emissions]


class Taker:
    """Takes at once what comes while the task waits, unless told to leave it."""

    def __init__(self) -> None:
        self.taken: list[Emission] = []
        self.is_willing = True

    def __call__(self, emission: Emission) -> bool:
        if self.is_willing:
            self.taken.append(emission)
        return self.is_willing


@pytest.fixture
def taker() -> Taker:
    return Taker()


@pytest.fixture
def mailbox(taker: Taker) -> Mailbox:
    mailbox = Mailbox(3, MAX_BYTES, lambda: None)
    mailbox.take_now = taker
    return mailbox


async def waiting(mailbox: Mailbox) -> "asyncio.Task[list[Emission]]":
    task = asyncio.create_task(mailbox.next())
    await asyncio.sleep(0)
    return task


async def test_what_is_taken_at_once_does_not_wake_the_task(mailbox: Mailbox, taker: Taker) -> None:
    task = await waiting(mailbox)
    for position in range(5):  # more than may be pending
        assert mailbox.deliver(emission(position))
    await asyncio.sleep(0)
    assert not task.done()
    assert positions(taker.taken) == [0, 1, 2, 3, 4]
    taker.is_willing = False
    mailbox.deliver(emission(5))
    assert positions(await task) == [5]


async def test_nothing_overtakes_what_is_pending(mailbox: Mailbox, taker: Taker) -> None:
    task = await waiting(mailbox)
    taker.is_willing = False
    mailbox.deliver(emission(0))
    taker.is_willing = True
    mailbox.deliver(emission(1))  # before the task had its turn
    assert positions(await task) == [0, 1]
    mailbox.deliver(emission(2))  # while the task is busy with those
    assert positions(await mailbox.next()) == [2]
    assert taker.taken == []


async def test_a_task_that_is_busy_may_not_lag_behind_without_end(mailbox: Mailbox) -> None:
    delivered = [mailbox.deliver(emission(position)) for position in range(4)]
    assert delivered == [True, True, True, False]
    with pytest.raises(Overloaded):
        await mailbox.next()


async def test_what_is_pending_is_bounded_in_bytes(mailbox: Mailbox) -> None:
    part = PromptLogprobs(positions=[PositionLogprobs(rank=7)] * 150)
    large = Emission(slot=1, prompt_logprobs=part)
    assert MAX_BYTES / 2 < large.ByteSize() < MAX_BYTES
    assert mailbox.deliver(large)
    assert await mailbox.next() == [large]
    assert mailbox.deliver(large), "what was taken does not count"
    assert not mailbox.deliver(large)
    with pytest.raises(Overloaded):
        await mailbox.next()


async def test_nothing_is_taken_after_a_failure(mailbox: Mailbox, taker: Taker) -> None:
    task = await waiting(mailbox)
    mailbox.fail(Overloaded("enough"), drop_pending=True)
    mailbox.deliver(emission(0))
    await asyncio.wait([task])
    assert taker.taken == []


async def test_a_failure_to_take_is_raised_in_the_task(mailbox: Mailbox) -> None:
    def fail(emission: Emission) -> bool:
        raise ValueError(f"cannot show position {emission.position}")

    mailbox.take_now = fail
    task = await waiting(mailbox)
    assert mailbox.deliver(emission(3))  # the router's reader goes on
    with pytest.raises(ValueError, match="position 3"):
        await task
