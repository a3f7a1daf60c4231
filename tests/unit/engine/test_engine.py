"""Whole requests through one engine."""

from typing import Any

import pytest

from paceline.core.errors import ErrorCode
from paceline.core.finish import FinishReason
from paceline.engine.messages import (
    Cancel,
    Emission,
    Ended,
    Removed,
    RequestSpec,
    Reserve,
    Stored,
    Submit,
)
from tests.unit.engine.benches import EDITED, EOS, Bench, alone, bench, mock_model, prompt, request

SEEDED = {"temperature": 1.3, "top_p": 0.95, "seed": 2**64 - 5}


def test_streams_tokens_then_ends_once() -> None:
    b = bench().handle(Submit(1, request(prompt(20), max_tokens=5))).run()
    assert len(b.tokens(1)) == 5
    assert b.finish(1) is FinishReason.LENGTH
    assert b.of(Ended) == [Ended(1)]
    b.assert_idle()


def test_max_tokens_one_takes_one_step() -> None:
    b = bench().handle(Submit(1, request(prompt(20), max_tokens=1)))
    output = b.step()
    assert output is not None and Ended(1) in output.events
    assert len(b.tokens(1)) == 1
    b.assert_idle()


def test_stops_on_the_first_token() -> None:
    spec = request(prompt(20), max_tokens=5)
    (first, *_) = alone(spec)[0]
    stopping = request(prompt(20), max_tokens=5, stop_token_ids=(first,))
    b = bench().handle(Submit(1, stopping)).run()
    assert b.tokens(1) == [first]
    assert b.finish(1) is FinishReason.STOP
    b.assert_idle()


def test_eos_stops_unless_ignored() -> None:
    model = mock_model(eos_every=24)
    b = bench(model)
    b.handle(Submit(1, request(prompt(20), max_tokens=9)))
    b.handle(Submit(2, request(prompt(20), max_tokens=9, ignore_eos=True))).run()
    assert b.tokens(1)[-1] == EOS and len(b.tokens(1)) == 5
    assert b.finish(1) is FinishReason.STOP
    assert len(b.tokens(2)) == 9 and b.tokens(2)[:5] == b.tokens(1)
    b.assert_idle()


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 100, 500])
def test_ucm_1295_min_tokens_masks_what_would_end_it(min_tokens: int) -> None:
    """https://github.com/ModelEngine-Group/unified-cache-management/pull/1295: min_tokens=100 of
    500, and others; the text would end at its third token, or where the model says so."""
    model = mock_model(eos_every=24, max_position_embeddings=1024)
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 500}
    third = alone(request(prompt(20), **sampling), model)[0][2]
    ends = {EOS, third}
    spec = request(prompt(20), min_tokens=min_tokens, stop_token_ids=(third,), **sampling)
    b = bench(model).handle(Submit(1, spec)).run()
    tokens = b.tokens(1)
    assert len(tokens) >= max(min_tokens, 1)
    assert not ends & set(tokens[:min_tokens])
    assert tokens[-1] in ends or len(tokens) == 500
    assert len(tokens) == 3 or min_tokens > 1
    b.assert_idle()


def test_ends_with_length_at_the_end_of_the_context() -> None:
    model = mock_model(max_position_embeddings=40)
    b = bench(model).handle(Submit(1, request(prompt(33), max_tokens=500))).run()
    assert len(b.tokens(1)) == 7
    assert b.finish(1) is FinishReason.LENGTH
    b.assert_idle()


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 48])
@pytest.mark.parametrize("sampling", [{}, SEEDED])
def test_prefix_hits_change_no_token(num_tokens: int, sampling: dict[str, float]) -> None:
    spec = request(prompt(num_tokens), max_tokens=20, **sampling)
    expected = alone(spec)[0]
    b = bench()
    for slot in (1, 2, 3):
        b.handle(Submit(slot, spec)).run()
        assert b.tokens(slot) == expected
    cached = [e for e in b.events if getattr(e, "num_cached_tokens", 0)]
    assert [e.slot for e in cached] == ([2, 3] if num_tokens > 16 else [])
    assert all(e.num_cached_tokens == (num_tokens - 1) // 16 * 16 for e in cached)
    b.assert_idle()


def test_equal_prompts_at_once_keep_the_first_copy() -> None:
    spec = request(prompt(64), max_tokens=20)
    b = bench().handle(*(Submit(slot, spec) for slot in range(6))).run()
    assert {tuple(b.tokens(slot)) for slot in range(6)} == {tuple(alone(spec)[0])}
    stored = [key for event in b.of(Stored) for key in event.keys]
    assert len(stored) == len(set(stored)) == 5
    b.assert_idle()


def test_prefix_cache_can_be_off() -> None:
    spec = request(prompt(40), max_tokens=3)
    b = bench(prefix_cache=False)
    for slot in (1, 2):
        b.handle(Submit(slot, spec)).run()
    assert all(e.num_cached_tokens == 0 for e in b.events if hasattr(e, "num_cached_tokens"))
    assert b.tokens(1) == b.tokens(2)
    b.assert_idle()


@pytest.mark.parametrize("num_tokens", [20, 32])
@pytest.mark.parametrize("sampling", [{}, SEEDED])
def test_choices_share_the_prompt(num_tokens: int, sampling: dict[str, float]) -> None:
    spec = request(prompt(num_tokens), max_tokens=20, n=3, **sampling)
    b = bench().handle(Submit(1, spec))
    b.step()
    num_blocks = num_tokens // 16
    assert [b.engine.pool.pages[p].refs for p in shared_pages(b, num_blocks)] == [3] * num_blocks
    b.run()
    for choice in range(3):
        one = request(prompt(num_tokens), max_tokens=20, n=3, choices=(choice,), **sampling)
        assert b.tokens(1, choice) == alone(one)[choice]
    assert len({tuple(b.tokens(1, c)) for c in range(3)}) == (3 if sampling else 1)
    b.assert_idle()


def shared_pages(b: Bench, num_blocks: int) -> list[int]:
    return b.engine.groups.live[1].sequences[0].tables[0].pages[:num_blocks]


@pytest.mark.parametrize("sampling", [{}, SEEDED, EDITED])
def test_forced_continuation_equals_the_undisturbed_run_at_every_cut(
    sampling: dict[str, Any],
) -> None:
    tokens = prompt(29)
    expected = alone(request(tokens, max_tokens=24, **sampling))[0]
    b = bench()
    for cut in range(1, 24):
        forced = tokens + expected[:cut]
        spec = request(forced, num_forced=cut, max_tokens=24, **sampling)
        b.handle(Submit(cut, spec)).run()
        assert b.tokens(cut) == expected[cut:]
        assert b.of(Emission, cut)[0].position == cut
        assert b.finish(cut) is FinishReason.LENGTH
    b.assert_idle()


def test_one_choice_of_many_is_continued_alone() -> None:
    sampling = dict(max_tokens=20, n=3, **SEEDED)
    expected = alone(request(prompt(29), **sampling))
    forced = prompt(29) + expected[2][:7]
    spec = request(forced, num_forced=7, choices=(2,), **sampling)
    assert alone(spec)[2] == expected[2][7:]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": [], "num_prompt_tokens": 0}, "prompt"),
        ({"token_ids": [-1], "num_prompt_tokens": 1}, "token_ids"),
        ({"token_ids": [97], "num_prompt_tokens": 1}, "token_ids"),
        ({"token_ids": [2**70], "num_prompt_tokens": 1}, "token_ids"),
        ({"token_ids": [1], "num_prompt_tokens": 2}, "num_prompt_tokens"),
        ({"token_ids": [1] * 9, "num_prompt_tokens": 1}, "max_tokens"),
        ({"choices": ()}, "choices"),
        ({"choices": (0, 0)}, "choices"),
    ],
)
def test_vllm_7632_malformed_requests_fail_alone(changes: dict[str, object], field: str) -> None:
    """https://github.com/vllm-project/vllm/issues/7632"""
    good = request(prompt(9))
    parts = {name: getattr(good, name) for name in good.__struct_fields__}
    b = bench().handle(Submit(1, RequestSpec(**(parts | changes))), Submit(2, good)).run()
    assert b.failure(1).code is ErrorCode.INVALID_REQUEST
    assert b.failure(1).field == field
    assert len(b.tokens(2)) == 8
    b.assert_idle()


def test_vllm_765_too_long_prompts_fail_at_once_with_the_numbers() -> None:
    """https://github.com/vllm-project/vllm/issues/765"""
    b = bench(num_pages=8)
    b.handle(Submit(1, request(prompt(128))), Submit(2, request(prompt(300))))
    b.handle(*(Submit(slot, request(prompt(100, slot))) for slot in range(3, 13))).run()
    for slot, length in ((1, 128), (2, 300)):
        assert b.failure(slot).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert f"prompt={length}: at most 127 tokens fit" in b.failure(slot).message
    assert all(len(b.tokens(slot)) == 8 for slot in range(3, 13))
    b.assert_idle()


def test_an_output_that_the_pool_cannot_hold_fails_at_once_with_the_numbers() -> None:
    b = bench(num_pages=8)
    b.handle(Submit(1, request(prompt(100), max_tokens=29)))
    b.handle(Reserve(2, request(prompt(100), max_tokens=200))).run()
    for slot, max_tokens in ((1, 29), (2, 200)):
        assert b.failure(slot).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        expected = f"max_tokens={max_tokens}: with 100 prompt tokens that is more than the pool"
        assert b.failure(slot).message == f"{expected} of 128 tokens holds"
    b.handle(Submit(3, request(prompt(100), max_tokens=28, ignore_eos=True))).run()
    assert len(b.tokens(3)) == 28
    b.handle(Submit(4, request(prompt(100), max_tokens=200), prefill_only=True)).run()
    assert len(b.tokens(4)) == 1  # decoded elsewhere
    b.handle(Cancel(4)).run()
    b.assert_idle()


def test_vllm_10583_and_sglang_39461_request_ids_are_never_keys() -> None:
    """https://github.com/vllm-project/vllm/issues/10583
    https://github.com/sgl-project/sglang/pull/39461"""
    specs = {
        slot: request(prompt(20, salt), max_tokens=20, request_id=name)
        for slot, (salt, name) in enumerate([(0, "job-1"), (1, "job-10"), (2, "job-1")], 1)
    }
    b = bench().handle(*(Submit(slot, spec) for slot, spec in specs.items()))
    for _ in range(5):
        b.step()
    b.handle(Cancel(1)).run()
    assert len(b.tokens(1)) < 20
    for slot in (2, 3):
        assert b.tokens(slot) == alone(specs[slot])[0]
    b.assert_idle()


def test_sglang_40125_a_slot_that_lives_is_not_replaced() -> None:
    """https://github.com/sgl-project/sglang/issues/40125"""
    first, second = request(prompt(20)), request(prompt(20, 1))
    b = bench().handle(Submit(1, first), Submit(1, second)).run()
    assert b.tokens(1) == alone(first)[0]
    b.assert_idle()


def test_full_queue_refuses_with_overloaded() -> None:
    b = bench(max_waiting=2)
    b.handle(*(Submit(slot, request(prompt(20))) for slot in range(4))).run()
    assert [b.failure(slot).code for slot in (2, 3)] == [ErrorCode.OVERLOADED] * 2
    assert len(b.tokens(0)) == len(b.tokens(1)) == 8
    b.assert_idle()


def test_vllm_ascend_12002_an_evicted_block_is_published_again() -> None:
    """https://github.com/vllm-project/vllm-ascend/issues/12002

    The index holds a key iff the block can be found; keys chain, so that a block's parent is the
    one before it whatever was evicted in between.
    """
    spec = request(prompt(97), max_tokens=1)
    b = bench(num_pages=16).handle(Submit(1, spec)).run()
    page = b.engine.cache.run_from(
        0,
        0,
        keys := [key for event in b.of(Stored) for key in event.keys],
        b"".join(b.engine.pool.pages[p].packed_tokens for p in range(6)),
    )[1]
    b.engine.cache.forget([page])
    b.handle(Submit(2, spec)).run()
    index: set[bytes] = set()
    for event in b.events:
        if isinstance(event, Stored):
            index |= set(event.keys)
        elif isinstance(event, Removed):
            index -= set(event.keys)
    assert [key in index for key in keys] == [True] * 6
    assert b.of(Removed) == [Removed([keys[1]])]
    assert b.of(Stored)[-1] == Stored([keys[1]])
    b.assert_idle()
