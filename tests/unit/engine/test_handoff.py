"""Prefill on one engine, decode on another, the pages copied in between."""

from typing import Any

import pytest

from paceline.core.finish import FinishReason
from paceline.core.keys import chain_keys
from paceline.core.kv_layout import PAGE_TOKENS
from paceline.engine.messages import (
    Adopt,
    Cancel,
    Committed,
    Emission,
    Ended,
    Follow,
    HandoffReady,
    KeyRun,
    Pin,
    Pinned,
    Pulled,
    Refused,
    Release,
    Reserve,
    Reserved,
    Submit,
    TransferClosed,
    Unpin,
)
from paceline.engine.outcome import MAX_REST_PAGES
from paceline.engine.page_pool import PageState
from tests.unit.engine.benches import EDITED, ROOT, alone, bench, mock_model, prompt, request
from tests.unit.engine.hand_overs import hand_over, pull

SEEDED = {"temperature": 1.3, "top_k": 40, "seed": 11}


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 100])
@pytest.mark.parametrize("sampling", [{}, SEEDED, SEEDED | {"n": 3}, EDITED, EDITED | {"n": 2}])
def test_split_equals_whole(num_tokens: int, sampling: dict[str, Any]) -> None:
    spec = request(prompt(num_tokens), max_tokens=20, **sampling)
    source, reader = bench(max_batch_tokens=24), bench()
    hand_over(source, reader, spec)
    for choice, expected in alone(spec).items():
        assert source.tokens(1, choice) + reader.tokens(1, choice) == expected
        assert reader.of(Emission)[0].position == 1
        assert reader.finish(1, choice) is FinishReason.LENGTH
    source.assert_idle()
    reader.assert_idle()


def test_sglang_26486_many_requests_of_many_choices_prefill_once() -> None:
    """https://github.com/sgl-project/sglang/pull/26486"""
    source, reader = bench(), bench(max_running=4)
    specs = {slot: request(prompt(20, slot), n=3, **SEEDED) for slot in range(20)}
    for slot, spec in specs.items():
        hand_over(source, reader, spec, slot)
    for slot, spec in specs.items():
        for choice, expected in alone(spec).items():
            assert source.tokens(slot, choice) + reader.tokens(slot, choice) == expected
        assert len(source.of(HandoffReady, slot)) == 1
    source.assert_idle()
    reader.assert_idle()


def test_commits_are_announced_as_they_happen_and_hits_at_once() -> None:
    spec = request(prompt(90))
    source = bench(max_batch_tokens=34, max_running=4)
    source.handle(Submit(1, spec, prefill_only=True)).run()
    assert [e.num_blocks for e in source.of(Committed, 1)] == [2, 4, 5]
    source.handle(Submit(2, spec, prefill_only=True))
    output = source.step()
    assert output is not None and output.events == [Committed(2, 5)]
    source.run()
    assert len(source.of(HandoffReady, 2)) == 1
    source.handle(Release(1), Release(2)).run()
    source.assert_idle()


def test_blocks_that_the_reader_has_are_not_pulled() -> None:
    spec = request(prompt(64), max_tokens=20)
    source, reader = bench(), bench()
    reader.handle(Submit(7, request(prompt(40)))).run()
    hand_over(source, reader, spec)
    assert reader.of(Reserved, 1)[0].num_cached_blocks == 2
    hand_over(source, reader, spec, 2)  # all four blocks are here: nothing to pull
    assert reader.of(Reserved, 2)[0].runs[0].pages == []
    for slot in (1, 2):
        assert source.tokens(slot) + reader.tokens(slot) == alone(spec)[0]
    source.assert_idle()
    reader.assert_idle()


def test_choices_that_end_with_their_first_token_are_not_decoded() -> None:
    free = request(prompt(20), n=3, **SEEDED)
    firsts = [tokens[0] for tokens in alone(free).values()]
    assert len(set(firsts)) == 3
    spec = request(prompt(20), n=3, stop_token_ids=(firsts[1],), **SEEDED)
    source, reader = bench(), bench()
    hand_over(source, reader, spec)
    (ready,) = source.of(HandoffReady)
    assert [t.finish for t in ready.first_tokens] == [None, FinishReason.STOP, None]
    assert [e.finish for e in source.of(Emission)] == [None, FinishReason.STOP, None]
    assert {e.choice for e in reader.of(Emission)} == {0, 2}
    spec = request(prompt(20), n=3, stop_token_ids=tuple(firsts), **SEEDED)
    hand_over(source, reader, spec, 2)
    assert not reader.of(Emission, 2) and reader.of(Ended, 2)
    reader.assert_idle()


def test_reserve_is_all_or_nothing() -> None:
    reader = bench(num_pages=10, output_window_tokens=32)
    spec = request(prompt(60), max_tokens=100)
    reader.handle(Reserve(1, spec)).run()
    assert len(reader.of(Reserved, 1)[0].runs[0].pages) == 4
    reader.handle(Reserve(2, spec)).run()
    assert reader.of(Refused) == [Refused(2, num_pages_needed=6, num_pages_free=4)]
    assert reader.engine.load().num_free_pages == 4
    reader.handle(Cancel(1), TransferClosed(1)).run()
    reader.handle(Reserve(3, spec)).run()
    assert len(reader.of(Reserved, 3)) == 1
    reader.handle(Cancel(3), TransferClosed(3)).run()
    reader.assert_idle()


def test_a_reservation_leaves_a_preempted_stream_what_it_waits_for() -> None:
    reader = bench(num_pages=10, output_window_tokens=0)
    specs = {slot: request(prompt(60, slot), max_tokens=40) for slot in (1, 2)}
    reader.handle(*(Submit(slot, spec) for slot, spec in specs.items()))
    while not reader.engine.scheduler.num_preemptions:
        reader.step()
    slots = range(3, 9)
    for slot in slots:  # each would fit beside the stream that runs
        assert reader.engine.pool.num_available >= 1
        assert reader.engine.load().num_free_pages == 0
        reader.handle(Reserve(slot, request(prompt(10, slot)))).step()
    assert [refused.slot for refused in reader.of(Refused)] == list(slots)
    urgent = request(prompt(10), priority=-1)
    reader.handle(Reserve(9, urgent), Cancel(9), TransferClosed(9)).run()
    assert reader.of(Reserved, 9)
    assert all(reader.tokens(slot) == alone(spec)[0] for slot, spec in specs.items())
    reader.assert_idle()


def test_rows_are_reserved_with_the_pages() -> None:
    reader = bench(max_running=2)
    reader.handle(Submit(1, request(prompt(20), max_tokens=90, n=2))).step()
    reader.step()
    for slot in (2, 3):  # one more than there are rows, as pulling takes a while
        reader.handle(Reserve(slot, request(prompt(30, slot)))).step()
    assert reader.of(Reserved, 2) and not reader.of(Refused, 2)
    assert reader.of(Refused, 3) and not reader.of(Reserved, 3)
    reader.handle(Cancel(1, choices=(1,)), Reserve(4, request(prompt(30, 4)))).step()
    assert reader.of(Reserved, 4)
    reader.handle(Cancel(1), Reserve(5, request(prompt(30, 5)))).run()
    assert reader.of(Reserved, 5)


def test_prompts_and_hand_overs_get_rows_in_the_order_in_which_they_came() -> None:
    """Neither is kept out by those of the other kind that come later."""
    source, reader = bench(), bench(max_running=1)
    specs = {slot: request(prompt(20, slot), max_tokens=20) for slot in (1, 2, 3, 4)}
    source.handle(Submit(3, specs[3], prefill_only=True)).run()
    reader.handle(Submit(1, specs[1])).step()
    reader.handle(Submit(2, specs[2]), Reserve(3, specs[3]), Submit(4, specs[4])).step()
    pull(source, reader, specs[3], 3)
    reader.handle(Adopt(3, source.of(HandoffReady, 3)[0].first_tokens)).run()
    assert [ended.slot for ended in reader.of(Ended)] == [1, 2, 3, 4]
    for slot, spec in specs.items():
        assert source.tokens(slot) + reader.tokens(slot) == alone(spec)[0]


def test_promised_output_is_not_given_to_others() -> None:
    source, reader = bench(), bench(num_pages=12, output_window_tokens=64)
    spec = request(prompt(60), max_tokens=64)
    reader.handle(Reserve(1, spec), Submit(2, request(prompt(90), max_tokens=30))).run()
    assert not reader.of(Emission, 2)
    assert reader.engine.load().num_waiting == 1
    source.handle(Submit(1, spec, prefill_only=True)).run()
    pull(source, reader, spec, 1)
    reader.handle(Adopt(1, source.of(HandoffReady)[0].first_tokens)).run()
    assert source.tokens(1) + reader.tokens(1) == alone(spec)[0]
    assert len(reader.tokens(2)) == 30
    assert reader.engine.scheduler.num_preemptions == 0
    reader.assert_idle()


def test_waiting_for_kv_holds_no_row() -> None:
    reader = bench(max_running=1)
    reader.handle(Reserve(1, request(prompt(30)))).run()
    reader.handle(Submit(2, request(prompt(30, 1)))).run()
    assert len(reader.tokens(2)) == 8
    assert reader.engine.load().num_running == 0
    assert reader.engine.awaits_kv()
    reader.handle(Cancel(1)).run()
    assert not reader.engine.awaits_kv()


def test_a_cancel_during_a_transfer_keeps_its_pages_until_it_is_closed() -> None:
    reader = bench(num_pages=16)
    reader.handle(Reserve(1, request(prompt(60)))).run()
    reader.handle(Cancel(1)).run()
    assert reader.of(Ended) == [Ended(1)]
    assert reader.engine.pool.counts[PageState.QUARANTINED] == 4
    assert reader.engine.load().num_free_pages == 12
    reader.handle(TransferClosed(1)).run()
    reader.assert_idle()


def test_vllm_ascend_14180_a_prefill_pool_for_one_and_a_half_prompts() -> None:
    """https://github.com/vllm-project/vllm-ascend/pull/14180"""
    source, reader = bench(num_pages=9, max_batch_tokens=20), bench()
    specs = {1: request(prompt(90)), 2: request(prompt(90, 1))}
    source.handle(*(Submit(slot, spec, prefill_only=True) for slot, spec in specs.items())).run()
    assert not source.of(HandoffReady, 2)
    reader.handle(*(Reserve(slot, spec) for slot, spec in specs.items())).run()
    for slot, spec in specs.items():
        source.run()
        pins = pull(source, reader, spec, slot)
        reader.handle(Adopt(slot, source.of(HandoffReady, slot)[0].first_tokens)).run()
        source.engine.pool_calls.answer(Unpin(pins))
        source.handle(Release(slot))
        assert source.tokens(slot) + reader.tokens(slot) == alone(spec)[0]
    source.run().assert_idle()
    reader.assert_idle()


def test_commands_for_gone_or_unfit_slots_do_nothing() -> None:
    b = bench()
    late = [Pulled(1, 0, 0, [[1]]), Adopt(1, []), Cancel(1), TransferClosed(1), Release(1)]
    b.handle(*late)
    assert b.step() is None
    spec = request(prompt(20))
    b.handle(Submit(1, spec)).step()
    b.handle(Pulled(1, 0, 0, [[1]]), Adopt(1, []), Release(1), TransferClosed(1)).run()
    assert b.tokens(1) == alone(spec)[0]
    b.handle(*late).run()
    b.handle(Reserve(2, spec)).run()
    b.handle(Pulled(2, 0, -1, [[1]] * 3), Pulled(2, 0, 0, [[]]), Pulled(2, 0, 1, [[5]]))
    b.handle(Pulled(2, 1, 0, [[1]]), Pulled(2, -1, 0, [[1]]))
    b.handle(Cancel(2), TransferClosed(2)).run()
    b.assert_idle()


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 40])
@pytest.mark.parametrize("first_block", [0, 1, 2])
def test_what_a_known_reader_lacks_is_pinned_with_the_record(
    num_tokens: int, first_block: int
) -> None:
    spec = request(prompt(num_tokens), max_tokens=20)
    source = bench(max_batch_tokens=24)
    source.handle(Submit(1, spec, prefill_only=True), Follow(1, [first_block])).run()
    (ready,) = source.of(HandoffReady, 1)
    assert ready.rest is not None
    keys = list(chain_keys(ROOT, spec.token_ids))[first_block:]
    asked = source.engine.pool_calls.answer(Pin([KeyRun(0, keys)], 1))
    assert asked == ready.rest and list(map(len, ready.rest.runs)) == [len(keys)]
    for pinned in (asked, ready.rest):
        pages = [(page.page, page.generation) for page in pinned.pages]
        source.engine.pool_calls.answer(Unpin(pages))
    source.handle(Release(1)).run()
    source.assert_idle()


@pytest.mark.parametrize("lacking", [0, 2, 3])
def test_a_rest_that_does_not_reach_the_end_of_the_prompt_is_none(lacking: int) -> None:
    """Its reader takes it from the end: cut short it would be laid onto the wrong blocks."""
    spec = request(prompt(8 * PAGE_TOKENS), max_tokens=20)
    source = bench(max_batch_tokens=4 * PAGE_TOKENS)
    source.handle(Submit(1, spec, prefill_only=True), Follow(1, [lacking]))
    while not source.of(Committed, 1):
        source.step()
    assert not source.of(HandoffReady)
    key = chain_keys(ROOT, spec.token_ids)[2]
    found = source.engine.pool_calls.answer(Pin([KeyRun(0, [key])]))
    assert isinstance(found, Pinned)
    source.engine.cache.forget([found.pages[0].page])  # as after a reader's report
    source.engine.pool_calls.answer(Unpin([(p.page, p.generation) for p in found.pages]))
    (ready,) = source.run().of(HandoffReady, 1)
    assert (ready.rest is None) == (lacking <= 2)
    if ready.rest is not None:
        pages = [(page.page, page.generation) for page in ready.rest.pages]
        source.engine.pool_calls.answer(Unpin(pages))
    source.handle(Release(1)).run()
    source.assert_idle()


@pytest.mark.parametrize(
    ("first_blocks", "max_tokens", "num_tokens"),
    [
        (None, 20, 40),  # nobody follows
        ([0, 0], 20, 40),  # of another layout
        ([0], 1, 40),  # nothing will be pulled
        ([0], 20, MAX_REST_PAGES * PAGE_TOKENS),  # more than is copied in one go
    ],
)
def test_nothing_is_pinned_that_no_reader_takes(
    first_blocks: list[int] | None, max_tokens: int, num_tokens: int
) -> None:
    model = mock_model(max_position_embeddings=4096)
    source = bench(model, num_pages=200, max_batch_tokens=512)
    source.handle(Submit(1, request(prompt(num_tokens), max_tokens=max_tokens), prefill_only=True))
    if first_blocks is not None:
        source.handle(Follow(1, first_blocks))
    (ready,) = source.run().of(HandoffReady, 1)
    assert ready.rest is None
    source.handle(Release(1)).run()
    source.assert_idle()
