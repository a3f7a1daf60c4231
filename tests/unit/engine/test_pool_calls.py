"""What readers ask of the pool, from a thread of their own."""

import sys
import threading
from collections.abc import Iterator

import pytest

from paceline.core.keys import chain_keys
from paceline.engine.messages import (
    CheckIntegrity,
    Integrity,
    KeyRun,
    Pin,
    Pinned,
    Recheck,
    Rechecked,
    Release,
    Removed,
    Submit,
    Unpin,
    Unpinned,
)
from paceline.engine.page_pool import PageState
from paceline.engine.pool_calls import CHECKED_PAGES
from tests.unit.engine.benches import ROOT, Bench, bench, prompt, request


def prefilled(num_tokens: int = 40) -> tuple[Bench, list[bytes]]:
    b = bench().handle(Submit(1, request(prompt(num_tokens)), prefill_only=True)).run()
    return b, list(chain_keys(ROOT, prompt(num_tokens)))


def pin(b: Bench, keys: list[bytes], tail_slot: int | None = None) -> Pinned:
    reply = b.engine.pool_calls.answer(Pin([KeyRun(0, keys)], tail_slot))
    assert isinstance(reply, Pinned)
    return reply


def test_pins_the_leading_run_and_the_tail() -> None:
    b, keys = prefilled()
    pinned = pin(b, [*keys, b"unknown", keys[0]], tail_slot=1)
    own_pages = b.engine.groups.live[1].sequences[0].tables[0].pages
    assert [p.page for p in pinned.runs[0]] == own_pages[:2]
    assert [p.page for p in pinned.tails] == own_pages[2:] and pinned.num_tail_tokens == 8
    assert pin(b, [b"unknown", keys[0]], tail_slot=2) == Pinned([[]])
    assert not pin(b, keys).tails
    for unknown in (-1, 1):
        call = Pin([KeyRun(unknown, keys)])
        assert b.engine.pool_calls.answer(call) == Pinned([[]])


def test_pinned_pages_outlive_their_slot_and_are_freed_by_unpin() -> None:
    b, keys = prefilled()
    pinned = pin(b, keys, tail_slot=1)
    b.handle(Release(1)).run()
    integrity = b.engine.pool_calls.answer(CheckIntegrity())
    assert isinstance(integrity, Integrity)
    assert (integrity.num_pinned, integrity.num_mapped, integrity.problem) == (3, 0, "")
    assert not pin(b, [], tail_slot=1).tails
    references = [(p.page, p.generation) for p in pinned.pages]
    stale = [(page, generation + 1) for page, generation in references]
    assert b.engine.pool_calls.answer(Unpin(stale)) == Unpinned()
    assert b.engine.pool.counts[PageState.PINNED] == 3
    assert b.engine.pool_calls.answer(Unpin(references * 2)) == Unpinned()
    b.assert_idle()


def test_recheck_drops_a_page_only_if_its_bytes_are_wrong_here() -> None:
    b, keys = prefilled()
    pinned = pin(b, keys)
    page = pinned.pages[1]
    recheck = Recheck(page.page, page.generation)
    assert b.engine.pool_calls.answer(recheck) == Rechecked(dropped=False, known=True)
    b.engine.runner.pools[0][page.page, 0, 0, 0, 3, 1] += 1
    assert b.engine.pool_calls.answer(Recheck(page.page, 99)) == Rechecked(
        dropped=False, known=False
    )
    assert b.engine.pool_calls.answer(recheck) == Rechecked(dropped=True, known=True)
    assert b.engine.has_work()
    b.run()
    assert b.of(Removed) == [Removed([keys[1]])]
    assert len(pin(b, keys).pages) == 1
    assert b.engine.pool_calls.answer(recheck) == Rechecked(dropped=False, known=False)
    assert b.engine.pool_calls.answer(Recheck(-1, 0)) == Rechecked(dropped=False, known=False)


def test_checks_go_round_the_pool_some_pages_at_a_time() -> None:
    b = bench(num_pages=2 * CHECKED_PAGES + 8)
    page = b.engine.pool.pages[CHECKED_PAGES]
    page.refs = 1
    found = [b.engine.pool_calls.answer(CheckIntegrity()) for _ in range(4)]
    assert [(reply.is_round, bool(reply.problem)) for reply in found] == [
        (False, False),
        (False, True),
        (True, True),
        (False, True),
    ]
    page.refs = 0


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns as often as in a rank."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_readers_and_steps_share_the_pool() -> None:
    b = bench(num_pages=24)
    keys = list(chain_keys(ROOT, prompt(64)))
    stop, problems = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            pinned = pin(b, keys)
            reply = b.engine.pool_calls.answer(CheckIntegrity())
            assert isinstance(reply, Integrity)
            problems.append(reply.problem)
            b.engine.pool_calls.answer(Unpin([(p.page, p.generation) for p in pinned.pages]))

    reader = threading.Thread(target=read)
    reader.start()
    for slot in range(30):
        b.handle(Submit(slot, request(prompt(64, slot % 3), max_tokens=3))).run()
    stop.set()
    reader.join(10)
    assert problems and not any(problems)
    assert len({tuple(b.tokens(slot)) for slot in range(0, 30, 3)}) == 1
    b.assert_idle()
