"""Stop strings: nothing of them is shown, nothing else is held back."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.gateway.stop_strings import StopAutomaton, StopMatcher

letters = st.text("ab", max_size=30)


def shown(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    """Deltas and whether it stopped."""
    matcher = StopMatcher([StopAutomaton(stop) for stop in stops])
    deltas = []
    for piece in pieces:
        deltas.append(matcher.push(piece))
        if matcher.stopped:
            return deltas, True
    return [*deltas, matcher.flush()], False


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first stop string that is complete, the longest of them."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def test_vllm_3574_no_part_of_a_stop_string_is_sent() -> None:
    """https://github.com/vllm-project/vllm/issues/3574"""
    deltas, stopped = shown(["AB", "CDE", "F", "GHIJ", "K"], ["DEFGHIJ"])
    assert deltas == ["AB", "C", "", ""]
    assert stopped


def test_vllm_13087_text_without_a_prefix_of_the_stop_string_is_not_held() -> None:
    """https://github.com/vllm-project/vllm/issues/13087"""
    pieces = [f"{i} " for i in range(20)]
    deltas, stopped = shown(pieces, ["ZZZZZZZZZZ"])
    assert deltas == [*pieces, ""]
    assert not stopped


def test_text_that_only_began_like_a_stop_string_is_shown_at_the_end() -> None:
    assert shown(["a", "ST", "O"], ["STOP"]) == (["a", "", "", "STO"], False)


@given(st.lists(letters), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
def test_any_split_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    deltas, stopped = shown(pieces, stops)
    assert ("".join(deltas), stopped) == expected("".join(pieces), stops)


@given(letters, st.text("ab", min_size=1, max_size=5))
def test_only_a_possible_start_of_the_stop_string_is_held_back(text: str, stop: str) -> None:
    matcher = StopMatcher([StopAutomaton(stop)])
    visible = matcher.push(text)
    if not matcher.stopped:
        held = text[len(visible) :]
        starts = [text[-n:] for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert held == max(starts, key=len, default="")
