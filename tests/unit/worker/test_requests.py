"""A router's request is refused at the edge, with field and value, before the engine sees it."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from paceline.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from paceline.core.pooling import Pooling
from paceline.core.sampling import SamplingParams
from paceline.engine.messages import RequestSpec
from paceline.rpc.convert import sampling_to_proto
from paceline.v1 import common_pb2
from paceline.worker.requests import to_spec

Change = Callable[[common_pb2.TokenRequest], None]


def request(**fields: object) -> common_pb2.TokenRequest:
    given: dict[str, Any] = {"request_id": "r", "root_key": bytes(32), "token_ids": [1, 2, 3]}
    given.update(fields)
    given.setdefault("num_prompt_tokens", len(given["token_ids"]))
    params = SamplingParams(max_tokens=5, n=2)
    return common_pb2.TokenRequest(sampling=sampling_to_proto(params), **given)


def spec_of(message: common_pb2.TokenRequest) -> RequestSpec:
    return to_spec(message, model="m", vocab_size=100, context_length=10)


def test_a_good_request_keeps_its_meaning() -> None:
    spec = spec_of(request(choices=[1, 0], priority=-3))
    assert spec.token_ids == [1, 2, 3]
    assert (spec.choices, spec.priority, spec.sampling.n) == ((1, 0), -3, 2)
    assert spec_of(request()).choices == (0, 1)
    assert spec_of(request(itl_ms=12.5)).itl_ms == 12.5
    for wrong in (-1.0, math.nan, math.inf, 1e9):
        with pytest.raises(InvalidRequest, match="itl_ms"):
            spec_of(request(itl_ms=wrong))


def test_an_embedding_may_fill_the_context_and_continues_nothing() -> None:
    message = request(token_ids=[1] * 10)
    with pytest.raises(ContextLengthExceeded):
        spec_of(message)
    message.pooling = common_pb2.POOLING_MEAN
    assert spec_of(message).pooling is Pooling.MEAN
    message.num_prompt_tokens = 9
    with pytest.raises(InvalidRequest, match="emitted"):
        spec_of(message)
    for value in (common_pb2.POOLING_UNSPECIFIED, 9):
        message.pooling = value  # type: ignore[assignment]
        with pytest.raises(InvalidRequest, match="pooling"):
            spec_of(message)


def too_hot(message: common_pb2.TokenRequest) -> None:
    message.sampling.temperature = math.nan


def no_tokens_left(message: common_pb2.TokenRequest) -> None:
    message.sampling.max_tokens = 2
    message.num_prompt_tokens = 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, 2, 100]}, "token_ids"),
        ({"token_ids": [1, 2, 2**32 - 1]}, "token_ids"),
        ({"num_prompt_tokens": 4}, "num_prompt_tokens"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 300}, "request_id"),
        ({"root_key": bytes(31)}, "root_key"),
        ({"choices": [0, 0]}, "choices"),
        ({"choices": [2]}, "choices"),
        ({"num_prompt_tokens": 2}, "choices"),  # two choices cannot share emitted tokens
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        spec_of(request(**fields))
    assert refused.value.field == field


@pytest.mark.parametrize("change", [too_hot, no_tokens_left])
def test_wrong_sampling_is_refused(change: Change) -> None:
    message = request(choices=[0])
    change(message)
    with pytest.raises(InvalidRequest):
        spec_of(message)


def test_the_context_must_hold_one_token_more() -> None:
    assert spec_of(request(token_ids=[1] * 9))
    with pytest.raises(ContextLengthExceeded):
        spec_of(request(token_ids=[1] * 10))


def test_another_model_is_not_served() -> None:
    with pytest.raises(ModelNotFound):
        spec_of(request(model="other"))
