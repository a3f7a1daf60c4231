import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import errors
from paceline.core.errors import ErrorCode, InvalidRequest, Overloaded
from paceline.core.finish import FinishReason
from paceline.core.sampling import LogitsProcessorCall, SamplingParams
from paceline.rpc import convert

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(10, 2**31),
    min_tokens=st.integers(0, 10),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**64 - 1),
    n=st.integers(1, 128),
    stop_token_ids=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    ignore_eos=st.booleans(),
    num_logprobs=st.integers(-1, 20),
    num_prompt_logprobs=st.integers(-1, 20),
    min_p=st.floats(0, 1),
    typical_p=st.floats(0, 1, exclude_min=True),
    repetition_penalty=st.floats(1e-6, 1e6),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    bad_words=st.lists(
        st.lists(st.integers(0, 2**31), min_size=1, max_size=4).map(tuple), max_size=3
    ).map(tuple),
    logits_processors=st.lists(
        st.builds(LogitsProcessorCall, st.text("ab", min_size=1), st.just('{"a": 1}')), max_size=2
    ).map(tuple),
)


@given(PARAMS)
def test_sampling_survives_the_wire(params: SamplingParams) -> None:
    assert convert.sampling_from_proto(convert.sampling_to_proto(params)) == params


def test_a_peers_sampling_is_checked_like_a_callers() -> None:
    message = convert.sampling_to_proto(SamplingParams())
    message.temperature = float("nan")
    with pytest.raises(InvalidRequest, match="temperature=nan"):
        convert.sampling_from_proto(message)


@pytest.mark.parametrize("code", [c for c in ErrorCode if c is not ErrorCode.CONFIG])
def test_error_codes_survive_the_wire(code: ErrorCode) -> None:
    message = convert.code_to_proto(code, "why", field="top_p", retry_after_s=1.5)
    error = convert.error_from_proto(message)
    assert (error.code, error.message, error.field) == (code, "why", "top_p")
    assert error.retry_after_s == 1.5


def test_an_errors_text_is_not_formatted_twice() -> None:
    sent = InvalidRequest("top_p", 7, "must lie in (0, 1]")
    assert convert.error_from_proto(convert.error_to_proto(sent)).message == sent.message


def test_the_type_survives_too() -> None:
    back = convert.error_from_proto(convert.error_to_proto(Overloaded("full", retry_after_s=2)))
    assert isinstance(back, Overloaded)


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons_survive_the_wire(reason: FinishReason | None) -> None:
    assert convert.finish_from_proto(convert.finish_to_proto(reason)) is reason


def test_every_error_has_a_code_of_its_tree() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]
    assert {k.code for k in kinds} == set(ErrorCode)
