"""Any mix of requests on a small engine gives each stream the tokens of a quiet run."""

import functools

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from paceline.engine.messages import (
    Cancel,
    Ended,
    PositionLogprobs,
    Reserve,
    Submit,
    TransferClosed,
)
from tests.unit.engine.benches import alone, bench, prompt, request
from tests.unit.engine.mixes import KINDS, MODEL, engines, play, requests


@functools.cache
def quiet_run(num_tokens: int, salt: int, max_tokens: int, kind: int) -> dict[int, list[int]]:
    spec = request(prompt(num_tokens, salt), max_tokens=max_tokens, **KINDS[kind])
    return alone(spec, MODEL)


@functools.cache
def scores_of_quiet_run(num_tokens: int, salt: int) -> list[PositionLogprobs]:
    spec = request(prompt(num_tokens, salt), max_tokens=1, num_prompt_logprobs=2)
    return bench(MODEL, num_pages=64).handle(Submit(1, spec)).run().scores(1)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=engines, mix=st.lists(requests, min_size=1, max_size=7))
def test_any_mix_gives_each_stream_the_tokens_of_a_quiet_run(
    config: dict[str, int], mix: list[tuple[int, ...]]
) -> None:
    b = bench(MODEL, **config)
    play(b, mix)
    for slot, (num_tokens, salt, max_tokens, kind, _, _, cancel) in enumerate(mix):
        for choice, expected in quiet_run(num_tokens, salt, max_tokens, kind).items():
            tokens = b.tokens(slot, choice)
            assert tokens == (expected if cancel is None else expected[: len(tokens)])
        expected_scores = []
        if "num_prompt_logprobs" in KINDS[kind]:
            expected_scores = scores_of_quiet_run(num_tokens, salt)
        scores = b.scores(slot)
        assert scores == (expected_scores if cancel is None else expected_scores[: len(scores)])
        assert len(b.of(Ended, slot)) == 1
    b.assert_idle()


def test_vllm_49620_more_than_fifty_preemptions_change_no_token() -> None:
    """https://github.com/vllm-project/vllm/pull/49620"""
    specs = {
        slot: request(prompt(14, slot), max_tokens=60, temperature=1.0, seed=slot)
        for slot in range(32)
    }
    b = bench(num_pages=8, max_batch_tokens=40, max_running=32, output_window_tokens=0)
    b.handle(*(Submit(slot, spec) for slot, spec in specs.items())).run()
    assert b.engine.scheduler.num_preemptions > 50
    quiet = bench(num_pages=256, max_running=32)
    quiet.handle(*(Submit(slot, spec) for slot, spec in specs.items())).run()
    assert quiet.engine.scheduler.num_preemptions == 0
    for slot in specs:
        assert b.tokens(slot) == quiet.tokens(slot)
    b.assert_idle()


def test_a_small_pool_serves_choices_that_do_not_fit_together() -> None:
    spec = request(prompt(20), max_tokens=100, n=6, temperature=1.0, seed=4)
    b = bench(num_pages=9, output_window_tokens=16).handle(Submit(1, spec)).run()
    for choice, expected in alone(spec).items():
        assert b.tokens(1, choice) == expected
    b.assert_idle()


def test_reserved_pages_are_never_taken_by_preemption() -> None:
    b = bench(num_pages=12, output_window_tokens=0)
    b.handle(Reserve(1, request(prompt(60)))).run()
    pages = list(b.engine.groups.live[1].sequences[0].tables[0].pages)
    specs = {slot: request(prompt(30, slot), max_tokens=90) for slot in (2, 3, 4)}
    b.handle(*(Submit(slot, spec) for slot, spec in specs.items())).run()
    for slot, spec in specs.items():
        assert b.tokens(slot) == alone(spec)[0]
    assert b.engine.groups.live[1].sequences[0].tables[0].pages == pages
    assert all(b.engine.pool.pages[page].refs == 1 for page in pages)
    b.handle(Cancel(1), TransferClosed(1)).run()
    b.assert_idle()
