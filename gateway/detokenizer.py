"""Token ids to text, step by step. No delta splits a code point; joined deltas are the whole text.

Byte-level vocabularies (GPT-2, Llama 3, SmolLM2) are exact for any ids: each token is bytes, and an
incremental UTF-8 decoder joins them. For others (SentencePiece with byte fallback, WordPiece) a
window of the last ids is decoded again with each token: what the window gained is the delta. Both
take time linear in the number of tokens.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

_MAX_HELD_TOKENS = 16  # a code point has at most 4 bytes; what is longer will never be valid
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """State of one choice."""

    def push(self, token_id: int) -> str:
        """Text that is certain now; empty inside a code point."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for bytes that never became a code point."""
        ...


class ByteTable:
    """Bytes of each token of a byte-level vocabulary, looked up once."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._bytes: dict[int, bytes] = {}

    def visible(self, token_id: int) -> bytes:
        """Bytes that a token adds to the text: special and unknown tokens add none."""
        return b"" if token_id in self._special_ids else self.raw(token_id)

    def raw(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:  # bounded by the vocabulary
            piece = self._tokenizer.id_to_token(token_id) or ""
            known = byte_level_bytes(piece)
            self._bytes[token_id] = known
        return known


class ByteLevelDetokenizer:
    """Exact and cheap: no call into the tokenizer a token."""

    __slots__ = ("_bytes_of", "_decoder")

    def __init__(self, table: ByteTable, *, skip_special: bool = True) -> None:
        self._bytes_of = table.visible if skip_special else table.raw
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Any decoder of `tokenizers`.

        ids    … | context | held …   text(context + held) minus text(context) is what is new

    A decoder may treat the first token of a text differently (SentencePiece strips its space), so
    the window starts with ids already shown: at first the last ids of the prompt.
    """

    __slots__ = ("_num_context", "_shown", "_skip_special", "_tokenizer", "_window")

    def __init__(
        self, tokenizer: Tokenizer, context_ids: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._start(list(context_ids))

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        num_held = len(self._window) - self._num_context
        text = self._decoded(self._window)
        if text.endswith(_REPLACEMENT) and num_held < _MAX_HELD_TOKENS:
            return ""
        delta = text[len(self._shown) :]
        if delta:
            self._start(self._window[self._num_context :])
        elif num_held >= _MAX_HELD_TOKENS:  # special tokens only: nothing to wait for
            del self._window[self._num_context :]
        return delta

    def flush(self) -> str:
        delta = self._decoded(self._window)[len(self._shown) :]
        self._start([])
        return delta

    def _start(self, context: list[int]) -> None:
        self._window = context
        self._num_context = len(context)
        self._shown = self._decoded(context) if context else ""

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)


def byte_level_bytes(piece: str) -> bytes:
    """Bytes of a byte-level piece; an added token with other characters is its own UTF-8."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()
