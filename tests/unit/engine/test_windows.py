"""Page groups with windows: what is held, found, handed over and given back."""

import numpy as np
import pytest

from paceline.core.keys import chain_keys
from paceline.engine.messages import (
    Adopt,
    Emission,
    HandoffReady,
    KeyRun,
    Pin,
    Pinned,
    Release,
    Reserve,
    Reserved,
    Submit,
    Unpin,
)
from paceline.engine.page_pool import PageState
from tests.unit.engine.benches import ROOT, Bench, alone, bench, prompt, request
from tests.unit.engine.hand_overs import hand_over, pull
from tests.unit.engine.windows import WINDOWS, expected_tokens, windowed_model

SEEDED = {"temperature": 1.3, "top_k": 40, "seed": 11}


def tables(b: Bench, slot: int = 1) -> list[tuple[int, int]]:
    """First block and number of blocks of each group."""
    sequence = b.engine.groups.live[slot].sequences[0]
    return [(table.first, len(table.pages)) for table in sequence.tables]


def forget(b: Bench, group: int, num_tokens: int, blocks: range) -> None:
    """Evicts blocks of prompt(num_tokens)."""
    for key in chain_keys(ROOT, prompt(num_tokens))[blocks.start : blocks.stop]:
        b.engine.cache.forget([b.engine.cache._page_of[group][key]])


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("num_tokens", [1, 16, 37, 130])
def test_tokens_are_those_of_a_model_that_keeps_all(kind: str, num_tokens: int) -> None:
    expected = expected_tokens(kind, tuple(prompt(num_tokens)), 40)
    for chunk in (13, 64):
        b = bench(windowed_model(kind), 400, max_batch_tokens=chunk)
        b.handle(Submit(1, request(prompt(num_tokens), max_tokens=40))).run()
        assert b.tokens(1) == expected
        b.assert_idle()


def test_blocks_are_let_go_when_they_leave_the_window() -> None:
    b = bench(windowed_model("mixed"), max_batch_tokens=32)
    b.handle(Submit(1, request(prompt(100), max_tokens=40))).step()
    assert tables(b) == [(0, 7), (0, 2), (0, 2), (0, 2)]  # token 32 sees 13 and on
    b.step()
    assert tables(b) == [(0, 7), (2, 4), (2, 4), (2, 4)]  # token 64 sees 45 and on
    pages = [t.pages for t in b.engine.groups.live[1].sequences[0].tables]
    assert b.engine.state.block_tables[0, 1:, :4].tolist() == [[0, 0, *p[2:4]] for p in pages[1:]]
    b.run()
    b.handle(Submit(2, request(prompt(100, 1), max_tokens=40)))
    assert max(b.run_counting()) == max(
        7 + 3 * 4, 9 + 3 * 3
    )  # a window of 20 and a chunk of 32, or a token
    b.assert_idle()


def test_a_window_needs_no_more_than_it_sees_however_long_the_prompt() -> None:
    model = windowed_model("all alike")
    b = bench(model, num_pages=4, max_batch_tokens=9)  # 24 and a chunk of 9: in at most 3 pages
    assert b.engine.max_length == model.context_length == 512
    specs = {slot: request(prompt(300, slot), max_tokens=100) for slot in (1, 2)}
    b.handle(*(Submit(slot, spec) for slot, spec in specs.items()))
    assert max(b.run_counting()) == 3
    for slot in specs:
        assert b.tokens(slot) == expected_tokens("all alike", tuple(prompt(300, slot)), 100)
    assert b.engine.scheduler.num_preemptions == 0
    b.assert_idle()
    assert bench(model, num_pages=2, max_batch_tokens=9).engine.max_length == 32


def test_a_hit_needs_all_of_full_attention_but_only_the_last_window() -> None:
    spec = request(prompt(130), max_tokens=4)

    def hit(slot: int) -> int:
        b.handle(Submit(slot, spec)).run()
        assert b.tokens(slot) == b.tokens(0)
        return int(b.of(Emission, slot)[0].num_cached_tokens)

    b = bench(windowed_model("two windows"), 400)  # full, 16, 40
    b.handle(Submit(0, spec)).run()
    assert hit(1) == 128
    forget(b, 1, 130, range(7))  # token 128 sees 113 and on
    forget(b, 2, 130, range(5))  # and 89 and on
    assert hit(2) == 128
    forget(b, 2, 130, range(5, 6))
    assert hit(3) == 0  # whoever sees block 7 of the second group needs block 5 or 6 of the third
    assert hit(4) == 128
    forget(b, 0, 130, range(4, 5))
    assert hit(5) == 64
    forget(b, 1, 130, range(2, 6))
    assert hit(6) == 128
    forget(b, 1, 130, range(7, 8))
    assert hit(7) == 112
    forget(b, 1, 130, range(6, 8))
    assert hit(8) == 32
    b.assert_idle()


@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("num_tokens", [1, 16, 47, 160, 171])
def test_split_equals_whole(kind: str, num_tokens: int) -> None:
    model = windowed_model(kind)
    source, reader = bench(model, 400, max_batch_tokens=24), bench(model, 400)
    hand_over(source, reader, request(prompt(num_tokens), max_tokens=30))
    expected = expected_tokens(kind, tuple(prompt(num_tokens)), 30)
    assert source.tokens(1) + reader.tokens(1) == expected
    spec = request(prompt(num_tokens), max_tokens=30, n=3, **SEEDED)
    hand_over(source, reader, spec, 2)
    for choice, tokens in alone(spec, model).items():
        assert source.tokens(2, choice) + reader.tokens(2, choice) == tokens
    source.assert_idle()
    reader.assert_idle()


def test_a_hand_off_holds_and_moves_the_last_window_only() -> None:
    model = windowed_model("mixed")
    source, reader = bench(model, 400), bench(model, 400)
    spec = request(prompt(170), max_tokens=8)
    source.handle(Submit(1, spec, prefill_only=True)).run()
    assert tables(source) == [(0, 11)] + [(9, 11)] * 3  # token 170 sees 151 and on
    assert source.engine.pool.counts[PageState.MAPPED] == 11 + 3 * 2
    assert source.engine.pool.num_promised == 0
    reader.handle(Reserve(1, spec)).run()
    (reserved,) = reader.of(Reserved, 1)
    assert [(run.first_block, len(run.pages)) for run in reserved.runs] == [(0, 11)] + [(9, 2)] * 3
    pins = pull(source, reader, spec, 1)
    reader.handle(Adopt(1, source.of(HandoffReady)[0].first_tokens)).run()
    source.engine.pool_calls.answer(Unpin(pins))
    source.handle(Release(1)).run()
    reader.handle(Reserve(2, spec)).run()
    (reserved,) = reader.of(Reserved, 2)
    assert reserved.num_cached_blocks == 10
    assert [(run.first_block, len(run.pages)) for run in reserved.runs] == [(10, 1)] * 4


def test_a_prompt_whose_promised_page_is_pinned_waits_for_it() -> None:
    b = bench(windowed_model("all alike"), 4, max_batch_tokens=16, max_pinned_share=1.0)
    spec = request(prompt(200), max_tokens=1)
    b.handle(Submit(1, spec, prefill_only=True)).step()
    b.step()
    b.step()
    keys = chain_keys(ROOT, prompt(200))
    pinned = b.engine.pool_calls.answer(Pin([KeyRun(0, list(keys[1:3]))]))
    assert isinstance(pinned, Pinned) and len(pinned.pages) == 2
    b.run()
    assert not b.of(HandoffReady) and b.engine.has_work()
    assert b.engine.pool.check_integrity() == ""
    load = b.engine.load()
    assert (load.num_free_pages, load.num_running, load.num_waiting) == (0, 0, 1)
    b.engine.pool_calls.answer(Unpin([(p.page, p.generation) for p in pinned.pages]))
    b.run()
    assert b.tokens(1) == expected_tokens("all alike", tuple(prompt(200)), 1)
    assert b.engine.scheduler.num_preemptions == 0
    b.handle(Release(1)).run()
    b.assert_idle()


def test_a_stream_whose_promised_page_is_pinned_waits_for_it() -> None:
    b = bench(windowed_model("all alike"), 4, max_batch_tokens=16, max_pinned_share=1.0)
    b.handle(Submit(1, request(prompt(64), max_tokens=100)))
    while not b.of(Emission):
        b.step()
    assert tables(b) == [(2, 4)]
    keys = chain_keys(ROOT, prompt(64))
    pinned = b.engine.pool_calls.answer(Pin([KeyRun(0, list(keys[2:]))]))
    assert isinstance(pinned, Pinned) and len(pinned.pages) == 2
    b.run()
    assert b.engine.has_work() and len(b.tokens(1)) == 33  # two pages are left to it: 64 to 95
    assert b.engine.load().num_running == 0, "no step is owed"
    b.engine.pool_calls.answer(Unpin([(p.page, p.generation) for p in pinned.pages]))
    b.run()
    assert b.tokens(1) == expected_tokens("all alike", tuple(prompt(64)), 100)
    assert b.engine.scheduler.num_preemptions == 0
    b.assert_idle()


def test_who_shares_a_window_still_gets_pages_of_its_own_later() -> None:
    model = windowed_model("all alike")
    b = bench(model, num_pages=8, max_batch_tokens=16, output_window_tokens=0)
    warm, specs = request(prompt(64), max_tokens=1), {}
    b.handle(Submit(0, warm)).run()
    for slot in range(1, 7):
        specs[slot] = request([*prompt(64), 8 + slot], max_tokens=60)
    b.handle(*(Submit(slot, spec) for slot, spec in specs.items()))
    while b.step() is not None:
        assert b.engine.pool.num_available >= 0
        assert b.engine.pool.check_integrity() == ""
    for slot, spec in specs.items():
        assert b.tokens(slot) == expected_tokens("all alike", tuple(spec.token_ids), 60)
    assert b.engine.scheduler.num_preemptions == 0
    b.assert_idle()


def test_what_is_found_in_one_group_is_not_evicted_for_another() -> None:
    b = bench(windowed_model("two windows"), 24, max_batch_tokens=16)
    for slot, num_tokens in enumerate((80, 32, 16)):
        b.handle(Submit(slot, request(prompt(num_tokens, slot), max_tokens=1))).run()
    pool, tokens = b.engine.pool, prompt(80)
    keys, packed = chain_keys(ROOT, tokens)[:4], np.array(tokens[:64], np.int64).tobytes()
    num_hits, hits = b.engine.cache.match(keys, packed)
    assert num_hits == 4 and not pool.free_pages
    for page in list(pool.cached_pages):  # what the last group finds is evicted first
        if page not in hits[2][1:]:
            assert pool.pin(page) and pool.unpin(page, pool.pages[page].generation)
    b.handle(Submit(4, request(tokens, max_tokens=20))).run()
    assert b.of(Emission, 4)[0].num_cached_tokens == 64
    assert b.tokens(4) == expected_tokens("two windows", tuple(tokens), 20)
    b.assert_idle()
