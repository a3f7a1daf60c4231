"""One choice: whatever the grouping of tokens into emissions, the caller sees the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import Cancelled, EngineFailure
from paceline.core.finish import FinishReason
from paceline.gateway.choice import Choice
from paceline.gateway.detokenizer import ByteLevelDetokenizer, ByteTable
from paceline.gateway.stop_strings import StopAutomaton
from paceline.v1 import common_pb2
from paceline.v1.common_pb2 import Emission
from tests.support.mock_model import EOS_TOKEN_ID, byte_tokenizer

TABLE = ByteTable(byte_tokenizer(260), frozenset(range(256, 260)))
LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP

# Text whose characters have 1 to 4 bytes, and bytes that are no text
some_bytes = st.one_of(st.text("ab é한😀").map(str.encode), st.binary(max_size=20))
stop_strings = st.lists(st.text("ab é한", min_size=1, max_size=3), max_size=3)


def make_choice(stops: list[str], min_tokens: int = 0) -> Choice:
    automata = [StopAutomaton(stop) for stop in stops]
    end_ids = frozenset([EOS_TOKEN_ID])
    return Choice(0, ByteLevelDetokenizer(TABLE), automata, min_tokens, end_ids)


def result(
    choice: Choice, groups: list[list[int]], finish: "common_pb2.FinishReason"
) -> tuple[str, int, FinishReason | None]:
    text = ""
    position = 0
    for index, group in enumerate(groups):
        last = finish if index == len(groups) - 1 else common_pb2.FINISH_REASON_UNSPECIFIED
        emission = Emission(position=position, token_ids=group, finish=last)
        position += len(group)
        text += choice.push(emission).text
        if choice.finish is not None:
            break
    return text, choice.num_tokens, choice.finish


@given(
    some_bytes,
    st.lists(st.integers(1, 5), min_size=1, max_size=30),
    stop_strings,
    st.integers(0, 8),
)
def test_any_grouping_of_tokens_gives_the_same(
    data: bytes, sizes: list[int], stops: list[str], min_tokens: int
) -> None:
    token_ids = [*data, EOS_TOKEN_ID]
    groups: list[list[int]] = []
    start = 0
    while start < len(token_ids):
        groups.append(token_ids[start : start + sizes[len(groups) % len(sizes)]])
        start += len(groups[-1])
    grouped = result(make_choice(stops, min_tokens), groups, STOP)
    whole = result(make_choice(stops, min_tokens), [token_ids], STOP)
    single = result(make_choice(stops, min_tokens), [[token_id] for token_id in token_ids], STOP)
    assert grouped == whole == single
    if not stops:
        assert whole[:2] == (data.decode(errors="replace"), len(token_ids))


def test_the_end_token_is_text_only_when_it_does_not_end() -> None:
    end = [ord("a"), EOS_TOKEN_ID]
    assert result(make_choice([]), [end], STOP) == ("a", 2, FinishReason.STOP)
    assert result(make_choice([]), [[97, 98]], STOP) == ("ab", 2, FinishReason.STOP)
    assert result(make_choice([]), [[*end, 98]], LENGTH) == ("ab", 3, FinishReason.LENGTH)


def test_a_gap_or_a_repetition_is_a_failure() -> None:
    choice = make_choice([])
    choice.push(Emission(position=0, token_ids=[97, 98]))
    for position in (0, 1, 3):
        with pytest.raises(EngineFailure, match="position"):
            choice.push(Emission(position=position, token_ids=[99]))


def test_a_cancel_from_elsewhere_is_an_error() -> None:
    with pytest.raises(Cancelled):
        make_choice([]).push(Emission(finish=common_pb2.FINISH_REASON_CANCELLED))
