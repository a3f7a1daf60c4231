"""Embeddings are prompts of the same engine that end in hidden states: whatever happens to them on
the way, each token's state counts once, and no logits are computed for them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from paceline.core.errors import ErrorCode
from paceline.core.pooling import Pooling
from paceline.engine.messages import Cancel, Embedding, Emission, Submit
from paceline.models.base import ForwardBatch
from paceline.models.mock import MockModel
from tests.support.batches import Sequence, make_batch, new_pool
from tests.unit.engine.benches import alone, bench, mock_model, prompt, request

MODEL = mock_model()
WINDOWED = mock_model(num_hidden_layers=2, layer_windows=[20, 0])
MEAN, LAST = Pooling.MEAN, Pooling.LAST


def by_definition(tokens: list[int], pooling: Pooling, model: Any = MODEL) -> NDArray[np.float32]:
    """From one forward of the whole prompt."""
    pool = new_pool(model, 16)
    batch = make_batch(model, [(Sequence(list(range(16))), tokens)], all_rows=True)
    states = model.hidden_states(batch, (pool,)).double()
    found = states[-1] if pooling is LAST else states.mean(dim=0)
    return found.float().numpy()


def assert_right(b: Any, slot: int, spec: Any, model: Any = MODEL) -> None:
    expected = by_definition(spec.token_ids, spec.pooling, model)
    np.testing.assert_allclose(b.vector(slot), expected, rtol=1e-5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model", [MODEL, WINDOWED], ids=["full", "windowed"])
@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("num_tokens", [1, 16, 90, 256])
def test_equal_their_definition(
    num_tokens: int, pooling: Pooling, model: Any, overlap: bool
) -> None:
    """In chunks, beside a stream; 256 tokens fill the context."""
    spec = request(prompt(num_tokens), pooling=pooling)
    other = request(prompt(20, 1), max_tokens=30)
    b = bench(model, 128, max_batch_tokens=24, overlap=overlap)
    b.handle(Submit(2, other)).step()
    b.handle(Submit(1, spec)).run().assert_idle()
    assert_right(b, 1, spec, model)
    assert b.tokens(2) == alone(other, model)[0]


class Counting(MockModel):
    num_logits = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        type(self).num_logits += len(hidden)
        return super().logits(hidden)


def test_no_logits_are_computed() -> None:
    model = mock_model()
    model.__class__ = Counting
    Counting.num_logits = 0
    specs = {i: request(prompt(50, i), pooling=[MEAN, LAST][i % 2]) for i in range(4)}
    b = bench(model).handle(*(Submit(slot, spec) for slot, spec in specs.items())).run()
    assert Counting.num_logits == 0 and len(b.of(Embedding)) == 4


def test_a_prefix_is_taken_from_the_cache_where_its_states_are_not_needed() -> None:
    b = bench().handle(Submit(1, request(prompt(100), max_tokens=2))).run()
    specs = {slot: request(prompt(100), pooling=way) for slot, way in ((2, LAST), (3, MEAN))}
    b.handle(*(Submit(slot, spec) for slot, spec in specs.items())).run().assert_idle()
    assert [b.of(Embedding, slot)[0].num_cached_tokens for slot in (2, 3)] == [96, 0]
    for slot, spec in specs.items():
        assert_right(b, slot, spec)


def test_what_an_embedding_computes_serves_generations() -> None:
    spec = request(prompt(100), max_tokens=4)
    b = bench().handle(Submit(1, request(prompt(100), pooling=MEAN))).run().handle(Submit(2, spec))
    b.run().assert_idle()
    assert b.of(Emission, 2)[0].num_cached_tokens == 96
    assert b.tokens(2) == alone(spec)[0]


def test_a_preempted_one_goes_on_where_its_sum_ends() -> None:
    spec = request(prompt(150), pooling=MEAN, priority=1)
    other = request(prompt(40, 1), max_tokens=90)
    b = bench(num_pages=13, max_batch_tokens=12, output_window_tokens=0)
    b.handle(Submit(1, other), Submit(2, spec)).step()
    while not b.engine.scheduler.num_preemptions:
        assert b.step() is not None
    states = b.engine.groups.live[2].pooled
    assert states is not None and 0 < states.num_seen < 150, "it was preempted in the middle"
    b.run().assert_idle()
    assert_right(b, 2, spec)
    assert b.tokens(1) == alone(other)[0]


def test_a_cancelled_one_ends_between_its_chunks() -> None:
    b = bench(max_batch_tokens=16).handle(Submit(1, request(prompt(100), pooling=MEAN)))
    b.step()
    b.handle(Cancel(1)).run().assert_idle()
    assert not b.of(Embedding)


class Spoiled(MockModel):
    def hidden_states(self, batch: ForwardBatch, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
        states = super().hidden_states(batch, pools)
        states[batch.positions[batch.logits_rows] == 30] = math.nan
        return states


def test_states_that_are_no_numbers_end_the_request() -> None:
    model = mock_model()
    model.__class__ = Spoiled
    good = request(prompt(20, 1), pooling=MEAN)
    b = bench(model).handle(Submit(1, request(prompt(50), pooling=MEAN)), Submit(2, good)).run()
    assert b.failure(1).code is ErrorCode.INTERNAL and not b.of(Embedding, 1)
    assert_right(b, 2, good)
    b.assert_idle()


@pytest.mark.parametrize(
    ("tokens", "options", "field"),
    [
        (prompt(257), {}, "prompt"),
        ([], {}, "prompt"),
        ([97], {}, "token_ids"),
        (prompt(5), {"num_forced": 1}, "pooling"),
    ],
)
def test_refused(tokens: list[int], options: Any, field: str) -> None:
    b = bench().handle(Submit(1, request(tokens, pooling=LAST, **options))).run()
    assert b.failure(1).field == field
    b.assert_idle()
