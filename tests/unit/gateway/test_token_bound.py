"""The bound on tokens is never above what the tokenizer says, and not far below it."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from paceline.gateway import token_bound
from paceline.gateway.token_bound import TokenBound

CORPUS = [
    (Path(__file__).parents[3] / name).read_text() for name in ("docs/architecture.md", "README.md")
]
ANY = 10**9


def trained(tokenizer: Tokenizer, specials: list[str] | None = None) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=specials or [], show_progress=False
    )
    tokenizer.train_from_iterator([*CORPUS, "    " * 50, "한국어 Größe " * 50, "=" * 64], trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    """Most control characters have no token: they are dropped."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return trained(tokenizer)


def normalized(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizer
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return trained(tokenizer, ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))])


def sentence_piece() -> Tokenizer:
    """As Llama 2 is written."""
    tokenizer = metaspace()
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return tokenizer


def with_added(tokenizer: Tokenizer) -> Tokenizer:
    """Tokens like those of Phi-3, which swallow spaces, and some that are odd."""
    tokenizer.add_tokens(
        [
            AddedToken("<|end|>", rstrip=True, normalized=False, special=True),
            AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False, special=True),
            AddedToken("two words", normalized=False),
            AddedToken("a\x04b", normalized=False),
            AddedToken("nor malized", normalized=True),
            AddedToken("single", single_word=True, normalized=False),
        ]
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "NFC": lambda: normalized(normalizers.NFC()),
    "NFKD": lambda: normalized(normalizers.Sequence([normalizers.NFKD()])),
    "replacing": lambda: normalized(normalizers.Replace("e", "")),
    "SentencePiece": sentence_piece,
    "Metaspace": metaspace,
    "added": lambda: with_added(byte_level()),
    "added, NFC": lambda: with_added(normalized(normalizers.NFC())),
    "added, SentencePiece": lambda: with_added(sentence_piece()),
    "added, Metaspace": lambda: with_added(metaspace()),
}
PIECES = [
    *(
        "the ",
        "prefill",
        " and",
        "decode",
        " ",
        "  ",
        "\n",
        "\t\n ",
        "====",
        "12",
        "x" * 9,
        "\u00a0",
    ),
    *(
        "<|end|>",
        "<mask>",
        "two words",
        "a\x04b",
        "nor malized",
        "single",
        "<0x41>",
        "\u2581",
        "\x04",
    ),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "ﬁ",
        "가",
        "\u1100\u1161",
        "\u212b",
        "日本",
        "\U0001f600",
        "\U00016d67",
    ),
]
texts = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join)
_made: dict[str, tuple[Tokenizer, TokenBound]] = {}


def made(kind: str) -> tuple[Tokenizer, TokenBound]:
    if kind not in _made:
        tokenizer = KINDS[kind]()
        _made[kind] = tokenizer, TokenBound(tokenizer)
    return _made[kind]


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, block_bytes=st.sampled_from([7, 1 << 16]))
@settings(max_examples=150, deadline=None)
def test_no_text_has_fewer_tokens(kind: str, text: str, block_bytes: int) -> None:
    tokenizer, bound = made(kind)
    with patch.object(token_bound, "_BLOCK_BYTES", block_bytes):
        assert bound.least_tokens(text, ANY) <= num_tokens(tokenizer, text)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_near_for_long_texts(kind: str) -> None:
    tokenizer, bound = made(kind)
    text = "\n".join(CORPUS).encode("ascii", "ignore").decode()
    text *= (3 << 16) // len(text) + 1  # several blocks
    least, exact = bound.least_tokens(text, ANY), num_tokens(tokenizer, text)
    assert 0.5 * exact < least <= exact
    assert 1000 <= bound.least_tokens(text, 1000) < exact / 2  # did not go on


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Strip(),
        normalizers.Lowercase(),
        normalizers.Replace("ab", "c"),
        normalizers.Prepend("x"),
        normalizers.Sequence([normalizers.NFC(), normalizers.Nmt()]),
    ],
)
def test_of_unknown_normalizers_nothing_is_said(normalizer: normalizers.Normalizer) -> None:
    assert TokenBound(normalized(normalizer)).least_tokens(CORPUS[0], ANY) == 0


def test_of_other_models_nothing_is_said() -> None:
    word_piece = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", 0.0)], unk_id=0))
    no_fallback = trained(Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True)), ["<unk>"])
    removing = byte_level()
    removing.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    for tokenizer in (word_piece, unigram, no_fallback, removing):
        assert TokenBound(tokenizer).least_tokens("a" * 1000, ANY) == 0


def test_a_text_that_is_not_normalized_is_not_judged() -> None:
    _, bound = made("NFC")
    assert bound.least_tokens("é" * 100, ANY) > 0
    assert bound.least_tokens("e\u0301" * 100, ANY) == 0
    assert bound.least_tokens("\U00016d67" * 100, ANY) == 0  # composed by newer libraries
