"""Texts of real vocabularies, trained here, of every family: joined deltas are the whole text.

What a gateway makes of a model's folder is asked, so the choice of the detokenizer is tested, too.
"""

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from paceline.gateway.tokenizer import TextModel
from tests.support.gateway_deployment import gateway_config
from tests.support.mock_model import write_mock_model

SPECIAL = "<|end|>"
TEXTS = [
    "The quick brown fox jumps over the lazy dog, doesn't it? 12345 67.89 it's  fine\n\n\tdone",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Größe, façade, naïve",
    "한국어 텍스트와 日本語の文章、そして中文字符。 Ελληνικά, русский язык, עברית",
    "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 a\u030a \u200b\ufeff",
] * 4
# How GPT-4 and Llama 3 split texts, short: letters with what stands before them, three digits
TIKTOKEN_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
SENTENCEPIECE = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(split: pre_tokenizers.PreTokenizer, *, ignores_merges: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=[SPECIAL], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def gpt2() -> Tokenizer:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ignores_merges=False)


def tiktoken() -> Tokenizer:
    """As its ranks are converted for Llama 3, Qwen and gpt-oss."""
    split = pre_tokenizers.Split(Regex(TIKTOKEN_SPLIT), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level(pre_tokenizers.Sequence([split, as_bytes]), ignores_merges=True)


def sentencepiece_bpe(*, strips: bool) -> Tokenizer:
    """With byte fallback. Llama 2 and Mistral put a space first and strip it, Gemma does not."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = SENTENCEPIECE if strips else normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", SPECIAL, *BYTES],
        initial_alphabet=list("▁aeiounrstlé한국어"),
        limit_alphabet=15,  # all others fall back to bytes, the line end as in Llama 2
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    return plain_bytes(tokenizer)


def plain_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """Byte tokens are in the vocabulary, and no added ones: a text that holds <0x41> is no A."""
    description = json.loads(tokenizer.to_str())
    kept = [one for one in description["added_tokens"] if one["content"] not in BYTES]
    description["added_tokens"] = kept
    return Tokenizer.from_str(json.dumps(description))


def unigram() -> Tokenizer:
    """As T5 and XLM-R: what is not in the vocabulary is unknown."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<unk>", SPECIAL],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": gpt2,
    "tiktoken": tiktoken,
    "llama 2": lambda: sentencepiece_bpe(strips=True),
    "gemma": lambda: sentencepiece_bpe(strips=False),
    "unigram": unigram,
}
BYTE_LEVEL = ("gpt2", "tiktoken")


@cache
def trained(family: str) -> Tokenizer:
    return FAMILIES[family]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def model(family: str, folder: Path) -> TextModel:
    made = write_mock_model(folder / family.replace(" ", ""))
    tokenizer = trained(family)
    tokenizer.add_tokens([AddedToken("plain añadido", special=False)])
    tokenizer.save(str(made / "tokenizer.json"))
    return TextModel(gateway_config(made, "127.0.0.1:1"))


def deltas(model: TextModel, token_ids: list[int], prompt_ids: list[int]) -> list[str]:
    detokenizer = model.detokenizer(prompt_ids)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


ANY_TEXT = st.text() | st.sampled_from(TEXTS) | st.text(alphabet=" aé한😀\n<>0x4▁")
with_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@with_fixtures
@given(ANY_TEXT)
def test_joined_deltas_of_a_text_are_the_whole_text(
    model: TextModel, family: str, text: str
) -> None:
    token_ids = model.encode(text, lambda num_tokens: None)
    found = deltas(model, token_ids, [])
    assert "".join(found) == trained(family).decode(token_ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in found)


@with_fixtures
@given(ANY_TEXT, ANY_TEXT)
def test_an_answer_goes_on_after_its_prompt(
    model: TextModel, family: str, prompt: str, text: str
) -> None:
    """And says what the whole text has more than the prompt by itself."""
    prompt_ids = model.encode("x" + prompt + "x", lambda num_tokens: None)
    token_ids = model.encode(text, lambda num_tokens: None)
    whole = trained(family).decode([*prompt_ids, *token_ids])
    assert (
        trained(family).decode(prompt_ids) + "".join(deltas(model, token_ids, prompt_ids)) == whole
    )


@pytest.mark.parametrize("family", ["llama 2", "gemma"], indirect=True)
@pytest.mark.parametrize("prompt", ["a 😀\n", "a 日本語", "a ý\n\n"])
def test_bytes_after_a_prompt_that_ends_with_bytes(
    model: TextModel, family: str, prompt: str
) -> None:
    """The last tokens of the prompt begin in the middle of a character."""
    prompt_ids = model.encode(prompt, lambda num_tokens: None)
    token_ids = [trained(family).token_to_id(f"<0x{byte:02X}>") for byte in "\n😀".encode()]
    found = deltas(model, token_ids, prompt_ids)
    assert found == ["\n", "", "", "", "😀", ""]


@pytest.mark.parametrize("family", BYTE_LEVEL, indirect=True)
@with_fixtures
@given(st.data())
def test_any_ids_of_a_byte_level_vocabulary_are_the_whole_text(
    model: TextModel, family: str, data: st.DataObject
) -> None:
    ids = st.integers(0, trained(family).get_vocab_size() - 1)
    token_ids = data.draw(st.lists(ids, max_size=40))
    assert "".join(deltas(model, token_ids, [])) == trained(family).decode(token_ids)


def test_time_is_linear_in_the_length_of_the_text(model: TextModel) -> None:
    def seconds(repeats: int) -> float:
        token_ids = model.encode(TEXTS[2] * repeats, lambda num_tokens: None)
        started = time.thread_time()
        deltas(model, token_ids, [])
        return time.thread_time() - started

    seconds(4)
    short = min(seconds(8) for _ in range(3))
    assert min(seconds(128) for _ in range(2)) < 16 * 6 * short  # quadratic: 256 times
