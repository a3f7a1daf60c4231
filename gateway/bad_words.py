"""Bad words as token sequences: as a text begins with them, and as they follow a space."""

from collections.abc import Sequence

from paceline.core.errors import InvalidRequest
from paceline.core.sampling import MAX_BAD_WORDS, MAX_WORD_CHARS
from paceline.gateway.tokenizer import TextModel


def check_bad_words(words: Sequence[str]) -> None:
    """Before they are tokenised. Raises InvalidRequest."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest("bad_words", f"{len(words)} words", f"at most {MAX_BAD_WORDS} words")
    for word in words:
        if not 0 < len(word.lstrip()) <= MAX_WORD_CHARS:
            reason = f"a bad word has between 1 and {MAX_WORD_CHARS} characters"
            raise InvalidRequest("bad_words", word, reason)


def bad_word_ids(text: TextModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """As vLLM does it: the form behind a space counts where it is as long and begins otherwise.

    Raises InvalidRequest.
    """
    stripped = list(dict.fromkeys(word.lstrip() for word in words))
    texts = [form for word in stripped for form in (word, " " + word)]
    encoded = text.encode_words(texts)
    sequences = []
    for word, plain, spaced in zip(stripped, encoded[::2], encoded[1::2], strict=True):
        if not plain:
            raise InvalidRequest("bad_words", word, "has no tokens")
        sequences.append(tuple(plain))
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(tuple(spaced))
    return tuple(sequences)
