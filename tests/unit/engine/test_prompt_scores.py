"""Log-probabilities of prompts: their values, and that none is missing whatever happens."""

import math

import pytest
import torch

from paceline.core.errors import ErrorCode
from paceline.engine.messages import (
    Adopt,
    Emission,
    Ended,
    HandoffReady,
    PositionLogprobs,
    PromptScored,
    Reserve,
    Submit,
)
from paceline.models.base import ForwardBatch
from paceline.models.mock import MockModel
from tests.support.batches import Sequence, new_pool, run
from tests.unit.engine.benches import alone, bench, mock_model, prompt, request
from tests.unit.engine.hand_overs import hand_over, pull

MODEL = mock_model(max_position_embeddings=2048)


def by_definition(tokens: list[int], num_top: int) -> list[PositionLogprobs]:
    """From one forward of the whole prompt, a token at a time."""
    pool = new_pool(MODEL, 64)
    logits = run(MODEL, pool, [(Sequence(list(range(64))), tokens)], all_rows=True).double()
    scores = []
    for row, token_id in zip(logits[:-1].log_softmax(dim=1).tolist(), tokens[1:], strict=True):
        best = sorted(range(len(row)), key=lambda i: -row[i])[:num_top]
        rank = sum(value >= row[token_id] for value in row)
        scores.append(PositionLogprobs(token_id, row[token_id], [(i, row[i]) for i in best], rank))
    return scores


def assert_equal(found: list[PositionLogprobs], expected: list[PositionLogprobs]) -> None:
    assert [(s.token_id, s.rank) for s in found] == [(s.token_id, s.rank) for s in expected]
    assert [s.logprob for s in found] == pytest.approx([s.logprob for s in expected], abs=1e-4)
    for score, wanted in zip(found, expected, strict=True):
        values = [value for _, value in score.top]
        assert values == pytest.approx([value for _, value in wanted.top], abs=1e-4)
        assert len({i for i, _ in score.top}) == len(score.top)


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("max_batch_tokens", [9, 34, 1024])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 90, 300])
def test_equal_their_definition(num_tokens: int, max_batch_tokens: int, num_top: int) -> None:
    spec = request(prompt(num_tokens), max_tokens=3, num_prompt_logprobs=num_top)
    b = bench(MODEL, max_batch_tokens=max_batch_tokens).handle(Submit(1, spec)).run()
    assert_equal(b.scores(1), by_definition(spec.token_ids, num_top))
    assert b.tokens(1) == alone(request(prompt(num_tokens), max_tokens=3), MODEL)[0]
    b.assert_idle()


def test_a_step_scores_so_many_rows_and_no_more() -> None:
    specs = {slot: request(prompt(200, slot), num_prompt_logprobs=0) for slot in range(3)}
    b = bench(MODEL, max_batch_tokens=1024)
    b.engine.scheduler.step_time.token_s = 1e-9  # nothing else limits a chunk
    b.handle(*(Submit(slot, spec) for slot, spec in specs.items()))
    most = 0
    while (output := b.step()) is not None:
        parts = [e for e in output.events if isinstance(e, PromptScored)]
        most = max(most, sum(len(part.scores) for part in parts))
    assert most == 128
    for slot, spec in specs.items():
        assert_equal(b.scores(slot), by_definition(spec.token_ids, 0))


def test_cached_pages_are_computed_again_where_their_logits_are_needed() -> None:
    plain = request(prompt(100), max_tokens=2)
    scored = request(prompt(100), max_tokens=2, num_prompt_logprobs=1)
    b = bench(MODEL).handle(Submit(1, plain)).run().handle(Submit(2, scored)).run()
    b.handle(Submit(3, plain)).run()
    assert_equal(b.scores(2), by_definition(scored.token_ids, 1))
    firsts = {slot: b.of(Emission, slot)[0] for slot in (1, 2, 3)}
    assert [firsts[slot].num_cached_tokens for slot in (1, 2, 3)] == [0, 0, 96]
    assert b.tokens(1) == b.tokens(2) == b.tokens(3)
    b.assert_idle()


def test_a_preempted_prompt_goes_on_where_its_scores_end() -> None:
    scored = request(prompt(150), max_tokens=2, num_prompt_logprobs=1, priority=1)
    b = bench(MODEL, num_pages=13, max_batch_tokens=12, output_window_tokens=0)
    b.handle(Submit(1, request(prompt(40, 1), max_tokens=90)), Submit(2, scored)).step()
    while not b.engine.scheduler.num_preemptions:
        assert b.step() is not None
    assert 0 < len(b.scores(2)) < 149, "it was preempted in the middle"
    b.run()
    assert_equal(b.scores(2), by_definition(scored.token_ids, 1))
    assert b.tokens(1) == alone(request(prompt(40, 1), max_tokens=90), MODEL)[0]
    b.assert_idle()


def test_choices_share_the_scores_and_continued_ones_have_none() -> None:
    spec = request(prompt(40), max_tokens=9, n=3, temperature=1.0, num_prompt_logprobs=1)
    b = bench(MODEL).handle(Submit(1, spec)).run()
    assert_equal(b.scores(1), by_definition(spec.token_ids, 1))
    tokens = b.tokens(1, 2)
    forced = [*spec.token_ids, *tokens[:4]]
    rest = request(
        forced,
        num_forced=4,
        choices=(2,),
        max_tokens=9,
        n=3,
        temperature=1.0,
        num_prompt_logprobs=1,
    )
    b.handle(Submit(2, rest)).run()
    assert b.tokens(2, 2) == tokens[4:] and not b.of(PromptScored, 2)


@pytest.mark.parametrize("max_tokens", [1, 60])
def test_vllm_ascend_13363_scores_come_from_prefill_and_never_from_decode(max_tokens: int) -> None:
    """https://github.com/vllm-project/vllm-ascend/issues/13363"""
    spec = request(prompt(90), max_tokens=max_tokens, num_prompt_logprobs=2)
    source = bench(MODEL, max_batch_tokens=34)
    reader = bench(MODEL, num_pages=10, output_window_tokens=0)
    hand_over(source, reader, spec)
    assert_equal(source.scores(1), by_definition(spec.token_ids, 2))
    assert not reader.of(PromptScored)
    whole = bench(MODEL).handle(Submit(1, spec)).run()
    assert_equal(whole.scores(1), source.scores(1))
    assert source.tokens(1) + reader.tokens(1) == whole.tokens(1)


def test_a_reader_that_is_preempted_scores_nothing() -> None:
    spec = request(prompt(60), max_tokens=90, num_prompt_logprobs=2, priority=1)
    other = request(prompt(60, 1), max_tokens=90)
    source, reader = bench(MODEL), bench(MODEL, num_pages=14, output_window_tokens=0)
    source.handle(Submit(1, spec, prefill_only=True)).run()
    reader.handle(Reserve(1, spec)).run()
    pull(source, reader, spec, 1)
    reader.handle(Adopt(1, source.of(HandoffReady)[0].first_tokens), Submit(2, other)).run()
    assert reader.engine.scheduler.num_preemptions > 0
    assert source.tokens(1) + reader.tokens(1) == alone(spec, MODEL)[0]
    assert not reader.of(PromptScored)


class Spoiled(MockModel):
    def forward(self, batch: ForwardBatch, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
        logits = super().forward(batch, pools)
        logits[batch.positions[batch.logits_rows] == 30] = math.nan
        return logits


def test_scores_that_are_no_numbers_end_the_request() -> None:
    model = mock_model()
    model.__class__ = Spoiled
    good = request(prompt(20, 1), max_tokens=4, num_prompt_logprobs=1)
    b = bench(model)
    b.handle(Submit(1, request(prompt(50), num_prompt_logprobs=1)), Submit(2, good)).run()
    assert b.failure(1).code is ErrorCode.INTERNAL
    assert not b.of(Emission, 1) and len(b.of(Ended, 1)) == 1
    assert len(b.scores(2)) == 19 and len(b.tokens(2)) == 4
    b.assert_idle()
