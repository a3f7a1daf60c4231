"""Deltas of token ids: whole code points, joined to the whole text, in linear time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.gateway.detokenizer import (
    ByteLevelDetokenizer,
    ByteTable,
    Detokenizer,
    WindowDetokenizer,
)
from tests.support.mock_model import byte_tokenizer

BYTE_LEVEL = byte_tokenizer(260)
SPECIAL_IDS = frozenset(range(256, 260))
TEXT = "ďa😀 한글, e\u0301!"


def sentencepiece_like() -> Tokenizer:
    """As Llama 2 and Gemma: ▁ for spaces, byte fallback, the text's first space stripped."""
    pieces = ["<unk>", "▁the", "▁cat", "s", "▁", "é", "한", "<end>", "\ufffd"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    vocabulary |= {f"<0x{byte:02X}>": len(pieces) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


SENTENCEPIECE = sentencepiece_like()
NUM_PIECES = 9


def byte_level() -> Detokenizer:
    return ByteLevelDetokenizer(ByteTable(BYTE_LEVEL, SPECIAL_IDS))


def deltas(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def test_vllm_mlx_109_characters_of_several_tokens_arrive_whole() -> None:
    """https://github.com/waybarrios/vllm-mlx/pull/109"""
    text = "ď😀한"
    found = deltas(byte_level(), list(text.encode()))
    assert "".join(found) == text
    assert all("\ufffd" not in delta for delta in found)
    assert found[-1] == ""


@given(st.lists(st.integers(0, 259)))
def test_any_byte_level_ids_give_the_text_of_the_tokenizer(token_ids: list[int]) -> None:
    whole = BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)
    assert "".join(deltas(byte_level(), token_ids)) == whole


@given(st.text(), st.booleans())
def test_sentencepiece_text_is_the_text_of_the_tokenizer(text: str, starts_apart: bool) -> None:
    token_ids = [1, 7, 2, 3] if starts_apart else []
    token_ids += [NUM_PIECES + byte for byte in text.encode()] + [1, 5, 6, 7, 4, 3]
    whole = SENTENCEPIECE.decode(token_ids, skip_special_tokens=True)
    found = deltas(WindowDetokenizer(SENTENCEPIECE), token_ids)
    assert "".join(found) == whole
    if "\ufffd" not in text:
        assert all("\ufffd" not in delta for delta in found)


@given(st.lists(st.integers(0, NUM_PIECES - 1)))
def test_sentencepiece_pieces_give_the_text_of_the_tokenizer(token_ids: list[int]) -> None:
    whole = SENTENCEPIECE.decode(token_ids, skip_special_tokens=True)
    assert "".join(deltas(WindowDetokenizer(SENTENCEPIECE), token_ids)) == whole


def test_a_first_token_keeps_its_space_after_a_prompt() -> None:
    assert deltas(WindowDetokenizer(SENTENCEPIECE, [1]), [2, 3]) == [" cat", "s", ""]


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    half = "😀".encode()[:2]
    assert "".join(deltas(byte_level(), list(half))) == "\ufffd"
    ids = [NUM_PIECES + byte for byte in half]
    assert "".join(deltas(WindowDetokenizer(SENTENCEPIECE), ids)) == "\ufffd\ufffd"


def test_an_added_token_with_plain_characters_is_its_own_text() -> None:
    tokenizer = byte_tokenizer(260)
    tokenizer.add_tokens([AddedToken("a é ✓", special=False)])
    detokenizer = ByteLevelDetokenizer(ByteTable(tokenizer, SPECIAL_IDS))
    assert deltas(detokenizer, [260, 33]) == [tokenizer.decode([260]), "!", ""]


@pytest.mark.parametrize(
    "kind", ["bytes", "window", "window of broken bytes", "window of specials"]
)
def test_time_is_linear_in_the_number_of_tokens(kind: str) -> None:
    make = byte_level if kind == "bytes" else lambda: WindowDetokenizer(SENTENCEPIECE)
    cycle = {
        "bytes": [0xF0, 0x9F],
        "window": [1, 2],
        "window of broken bytes": [NUM_PIECES + 0xF0],
        "window of specials": [7],
    }[kind]

    def seconds(num_tokens: int) -> float:
        token_ids = (cycle * num_tokens)[:num_tokens]
        detokenizer, start = make(), time.thread_time()
        for token_id in token_ids:
            detokenizer.push(token_id)
        return time.thread_time() - start

    seconds(100)
    short = min(seconds(500) for _ in range(3))
    assert min(seconds(8000) for _ in range(3)) < 16 * 6 * short  # quadratic: 256 times
