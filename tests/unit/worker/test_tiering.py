"""What a worker offers, offloads and fills, between its rank and its tiers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import Cancelled, ConfigError, Unavailable
from paceline.core.keys import chain_keys
from paceline.core.kv_layout import PageGroup
from paceline.engine import messages
from paceline.engine.messages import GrantedRun, KeyRun, PinnedPage
from paceline.kernels.pages import sum_pages
from paceline.kv_transfer.tiers.base import Nobody, PageName, Tier
from paceline.kv_transfer.tiers.host import HostTier
from paceline.kv_transfer.tiers.stack import TierStack
from paceline.worker.config import ComputeSettings, WorkerConfig
from paceline.worker.session import Session
from paceline.worker.tiering import NUM_FILL_THREADS, Tiering
from tests.contract.pools import SMALL, make_pool
from tests.support.waits import until

TOKENS = list(range(16 * 6 + 3))
KEYS = chain_keys(bytes(32), TOKENS)
WINDOW = replace(SMALL, name="window", window=33)  # the token after a block sees two before it


class Rank:
    """A pool that holds block i of KEYS in page i of every group's run, and says what it was
    asked."""

    def __init__(self, groups: tuple[PageGroup, ...]) -> None:
        self.ready = SimpleNamespace(groups=groups)
        self.link = self
        self.pool = make_pool(SMALL, 16, 1)
        self.sums = sum_pages(self.pool.memory, np.arange(16), SMALL)
        self.gone: set[bytes] = set()
        self.is_lost = False
        self.calls: list[messages.PoolCall] = []

    async def call(self, call: messages.PoolCall) -> messages.PoolReply:
        self.calls.append(call)
        if self.is_lost:
            raise Unavailable("the worker's engine has stopped")
        if isinstance(call, messages.Recheck):
            return messages.Rechecked(True, True)
        assert isinstance(call, messages.Pin)
        return messages.Pinned([self._run(run) for run in call.runs])

    def _run(self, run: KeyRun) -> list[PinnedPage]:
        (key,) = run.keys
        if key in self.gone:
            return []
        page = KEYS.index(key)  # type: ignore[arg-type]
        return [PinnedPage(page, 7, self.sums[page].tolist())]


class Rig:
    """A session as far as tiering knows it."""

    def __init__(self, groups: tuple[PageGroup, ...] = (SMALL,)) -> None:
        self.rank = Rank(groups)
        self.sent: list[Any] = []
        self.unpinned: list[tuple[int, int]] = []
        self.tier = HostTier("host", SMALL, 32, "lru")
        self.slot: Any = SimpleNamespace(
            number=5,
            ending=False,
            offer=None,
            fill=None,
            keys=[],
            request=SimpleNamespace(root_key=bytes(32), token_ids=TOKENS),
        )
        self.session: Any = SimpleNamespace(
            rank=self.rank, send=self.sent.append, unpin=self.unpinned.extend, fills=set()
        )
        self.stack = TierStack([self.tier], Nobody())
        self.tiering = self.session.tiering = Tiering(self.session, self.stack, self.rank.pool)

    def store(self, *blocks: int) -> None:
        self.tiering.keys_changed(messages.Stored([KEYS[block] for block in blocks]))

    def evict(self, *blocks: int) -> None:
        self.tiering.keys_changed(messages.Removed([KEYS[block] for block in blocks]))

    def held(self, group: int = 0) -> list[int]:
        return [i for i, key in enumerate(KEYS) if self.tier.holds(PageName(key, group))]

    def fill(self, *pages: int) -> None:
        Session.fill(self.session, self.slot, messages.Fill(5, [GrantedRun(1, list(pages))]))


@pytest.fixture
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    made = Rig(getattr(request, "param", (SMALL,)))
    yield made
    await made.tiering.close()


async def test_what_the_pool_stores_is_offloaded_once_and_unpinned(rig: Rig) -> None:
    rig.store(0, 1)
    rig.store(2)
    await until(lambda: rig.held() == [0, 1, 2] and len(rig.unpinned) == 3)
    assert sorted(rig.unpinned) == [(0, 7), (1, 7), (2, 7)]
    pins = len(rig.rank.calls)
    rig.store(1)
    rig.store(3)
    await until(lambda: rig.held() == [0, 1, 2, 3])
    runs = [run for call in rig.rank.calls[pins:] for run in call.runs]  # type: ignore[union-attr]
    assert [run.keys for run in runs] == [[KEYS[3]]]


async def test_what_was_evicted_meanwhile_is_passed_over(rig: Rig) -> None:
    rig.rank.gone.add(KEYS[1])
    rig.store(0, 1, 2)
    await until(lambda: rig.held() == [0, 2])


async def test_a_page_that_is_wrong_in_the_pool_is_reported_and_not_kept(rig: Rig) -> None:
    rig.rank.sums[1, 0] += 1
    rig.store(0, 1, 2)
    await until(lambda: messages.Recheck(1, 7) in rig.rank.calls)
    assert rig.held() == [0, 2]
    await until(lambda: len(rig.unpinned) == 3)


async def test_a_rank_that_is_lost_ends_it(rig: Rig) -> None:
    rig.rank.is_lost = True
    rig.store(0)
    await until(lambda: bool(rig.rank.calls))
    rig.store(1)
    await asyncio.sleep(0.02)
    assert rig.held() == []


async def test_what_pool_and_then_tiers_lead_with_is_offered(rig: Rig) -> None:
    assert rig.tiering.offer(rig.slot) == 0
    rig.store(0, 1, 2, 3, 5)
    await until(lambda: rig.held() == [0, 1, 2, 3, 5])
    assert rig.tiering.offer(rig.slot) == 0  # all of it is in the pool
    rig.evict(2, 3, 5)
    assert rig.tiering.offer(rig.slot) == 4  # block 4 is nowhere
    rig.evict(0, 1)
    assert rig.tiering.offer(rig.slot) == 4


@pytest.mark.parametrize("rig", [(SMALL, WINDOW)], indirect=True)
async def test_windows_need_what_the_next_token_sees(rig: Rig) -> None:
    rig.store(0, 1, 2, 3, 4, 5)
    await until(lambda: rig.held(1) == [0, 1, 2, 3, 4, 5])
    rig.evict(0, 1, 2, 3, 4, 5)
    assert rig.tiering.offer(rig.slot) == 6
    for block, reach in ((5, 5), (0, 5), (3, 3)):  # gone from the window's group, block by block
        name = PageName(KEYS[block], 1)
        pin = rig.tier.pin([name])
        rig.tier.report(int(pin.pages[0]), int(pin.generations[0]))
        rig.tier.unpin(pin)
        assert rig.tiering.offer(rig.slot) == reach


async def test_a_fill_pulls_what_there_is_and_says_what_came(rig: Rig) -> None:
    rig.store(1, 2, 4)
    await until(lambda: rig.held() == [1, 2, 4])
    rig.tiering.offer(rig.slot)
    rig.fill(11, 12, 13, 14)  # for blocks 1 to 4
    await rig.slot.fill.finished()
    sums = rig.rank.sums.tolist()
    assert rig.sent == [
        messages.Pulled(5, 0, 1, [sums[1], sums[2]]),
        messages.Pulled(5, 0, 4, [sums[4]]),
        messages.Filled(5),
    ]
    filled = sum_pages(rig.rank.pool.memory, np.array([11, 12, 14]), SMALL)
    assert filled.tolist() == [sums[1], sums[2], sums[4]]


async def test_a_slot_that_ended_before_its_fill_gets_its_pages_back(rig: Rig) -> None:
    rig.slot.ending = True
    rig.fill(11)
    assert rig.sent == [messages.TransferClosed(5)] and rig.slot.fill is None


async def test_a_fill_that_is_stopped_closes_its_transfer_when_the_copy_has_ended(
    rig: Rig,
) -> None:
    may_end = threading.Event()

    def pull(*args: Any) -> dict[int, list[int]]:
        may_end.wait(5)
        raise Cancelled("the pull was cancelled")

    rig.tiering.stack = SimpleNamespace(pull=pull, tiers=rig.stack.tiers)  # type: ignore[assignment]
    rig.slot.keys = KEYS
    rig.fill(11)
    await asyncio.sleep(0.01)
    assert rig.slot.fill.stop() and not rig.sent
    may_end.set()
    await rig.slot.fill.finished()
    assert rig.sent == [messages.TransferClosed(5)]
    assert not rig.slot.fill.stop()


@dataclass
class HangingStack:
    """Pulls wait for the store, however they are asked."""

    tiers: tuple[Tier, ...]
    put: Any
    num_pulls: int = 0
    may_end: threading.Event = field(default_factory=threading.Event)

    def pull(self, *args: Any) -> dict[int, list[int]]:
        self.num_pulls += 1
        self.may_end.wait(5)
        return {}


@pytest.fixture
def hanging(rig: Rig) -> Iterator[HangingStack]:
    stack = HangingStack(rig.stack.tiers, rig.stack.put)
    rig.tiering.stack = stack  # type: ignore[assignment]
    rig.slot.keys = KEYS
    yield stack
    stack.may_end.set()


async def test_a_fill_that_waits_for_a_thread_ends_as_soon_as_it_is_stopped(
    rig: Rig, hanging: HangingStack
) -> None:
    for _ in range(NUM_FILL_THREADS):
        rig.fill(11)
    await until(lambda: hanging.num_pulls == NUM_FILL_THREADS)
    rig.fill(12)
    await asyncio.sleep(0)
    assert rig.slot.fill.stop()
    await asyncio.wait_for(rig.slot.fill.finished(), 1)
    assert rig.sent == [messages.TransferClosed(5)]
    hanging.may_end.set()
    await until(lambda: len(rig.sent) == 1 + NUM_FILL_THREADS)
    assert hanging.num_pulls == NUM_FILL_THREADS


async def test_fills_that_wait_for_a_store_do_not_hold_up_the_offload(
    rig: Rig, hanging: HangingStack
) -> None:
    for _ in range(NUM_FILL_THREADS + 2):
        rig.fill(11)
    rig.store(0)
    await until(lambda: rig.held() == [0])


async def test_requests_are_looked_up_beside_the_event_loop_and_keep_their_order(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said of a slot meanwhile comes behind its Submit."""
    may_look = threading.Event()
    monkeypatch.setattr(rig.stack, "touch", lambda names: may_look.wait(5))
    first, second = (SimpleNamespace(**{**vars(rig.slot), "number": n}) for n in (1, 2))
    rig.store(0, 1)
    await until(lambda: rig.held() == [0, 1])
    rig.evict(1)
    rig.tiering.submit(first, prefill_only=True)
    rig.tiering.submit(second, prefill_only=False)
    await asyncio.sleep(0.01)  # the loop turns, and nothing is known yet
    cancel, follow = messages.Cancel(2, (1,)), messages.Follow(2, [0])
    assert rig.tiering.holds_back(cancel) and rig.tiering.holds_back(follow) and not rig.sent
    may_look.set()
    await until(lambda: len(rig.sent) == 4)
    submits = [
        messages.Submit(1, first.request, True, 2),
        messages.Submit(2, second.request, False, 2),
    ]
    assert rig.sent == [*submits, cancel, follow]
    assert not rig.tiering.holds_back(cancel)


async def test_a_bug_in_a_look_up_costs_the_hit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(rig.slot.request, "root_key")
    rig.tiering.submit(rig.slot, prefill_only=False)
    await until(lambda: rig.sent == [messages.Submit(5, rig.slot.request)])


async def test_a_bug_in_a_tier_costs_the_hit(rig: Rig) -> None:
    def pull(*args: Any) -> dict[int, list[int]]:
        raise KeyError("a bug")

    rig.tiering.stack = SimpleNamespace(pull=pull, tiers=rig.stack.tiers)  # type: ignore[assignment]
    rig.slot.keys = KEYS
    rig.fill(11)
    await rig.slot.fill.finished()
    assert rig.sent == [messages.Filled(5)]


def test_a_pool_on_a_device_is_refused_before(tmp_path: Path) -> None:
    listed = tmp_path / "tiers.yaml"
    listed.write_text("- {kind: host, capacity_mib: 1}")
    with pytest.raises(ConfigError, match="a pool on a device has no tiers yet"):
        WorkerConfig(
            model=str(tmp_path), secret="s" * 16, compute=ComputeSettings("cuda"), tiers=listed
        )
