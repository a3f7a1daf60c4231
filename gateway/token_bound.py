"""The fewest tokens that a text can have, found in a hundredth of the time that tokenising takes.

Two facts of the vocabulary make it exact enough to refuse a text that is much too long:

- Two bytes that stand side by side in no token have a border between tokens between them.
- A byte weighs 1 / length of the longest token that holds it. No token weighs more than 1, so a
  piece between borders has at least as many tokens as it weighs.

This holds for byte-pair models; of other tokenizers nothing is said.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from tokenizers import Tokenizer

from paceline.gateway.detokenizer import BYTE_OF_CHARACTER, byte_level_bytes
from paceline.gateway.text_path import TextPath, UnknownPath

_BLOCK_BYTES = 1 << 16
_ONE = 1 << 32  # weights are whole numbers of 1 / _ONE, so that their sums are exact


class TokenBound:
    """Made once a tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        description: dict[str, Any] = orjson.loads(tokenizer.to_str())
        self._path: TextPath | None = None
        self._dropped = b""
        try:
            path = TextPath(tokenizer, description)
            tokens = _model_tokens(description["model"], path) | path.added_tokens()
            self._dropped = _dropped_bytes(description["model"], path)
            tokens |= {token.translate(None, self._dropped) for token in tokens}
        except UnknownPath:
            return
        self._path = path
        tokens.discard(b"")
        joined = np.frombuffer(b"".join(tokens), np.uint8)
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self._weights = _weights(joined, lengths)
        self._is_border = _borders(joined, lengths)

    def least_tokens(self, text: str, enough: int) -> int:
        """A lower bound, 0 if nothing is known; counting stops at `enough`."""
        seen = self._path.seen(text) if self._path is not None else None
        raw = np.frombuffer((seen or "").encode().translate(None, self._dropped), np.uint8)
        num_tokens = min(1, len(raw))
        for start in range(0, len(raw), _BLOCK_BYTES):
            # A token may lie across two blocks; it is counted in both.
            num_tokens += self._count(raw[start : start + _BLOCK_BYTES]) - 1
            if num_tokens >= enough:
                break
        return num_tokens

    def _count(self, raw: NDArray[np.uint8]) -> int:
        """Of a block, [n], n > 0."""
        starts = np.flatnonzero(self._is_border[_pairs(raw)]) + 1
        weights = np.add.reduceat(self._weights[raw], np.concatenate(([0], starts)))
        return int(-(-weights // _ONE).sum())


def _pairs(raw: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """[n] → [n - 1]: each byte with the next."""
    pairs = raw[:-1].astype(np.uint16)
    pairs <<= 8
    pairs |= raw[1:]
    return pairs


def _weights(joined: NDArray[np.uint8], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """[256]. `joined`: the bytes of all tokens, whose `lengths` add up to it."""
    longest = np.ones(256, np.int64)
    np.maximum.at(longest, joined, np.repeat(lengths, lengths))
    return _ONE // longest


def _borders(joined: NDArray[np.uint8], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[65536]: whether a pair of bytes stands in no token."""
    is_inside = np.ones(len(joined) - 1, np.bool_)
    is_inside[np.cumsum(lengths)[:-1] - 1] = (
        False  # the last byte of a token, the first of the next
    )
    is_border = np.ones(1 << 16, np.bool_)
    is_border[_pairs(joined)[is_inside]] = False
    return is_border


def _model_tokens(model: Mapping[str, Any], path: TextPath) -> set[bytes]:
    if model["type"] != "BPE":
        raise UnknownPath(model["type"])
    if model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        raise UnknownPath("affixes")
    encode = byte_level_bytes if path.is_byte_level else str.encode
    return {encode(token) for token in model["vocab"]}


def _dropped_bytes(model: Mapping[str, Any], path: TextPath) -> bytes:
    """Bytes that are in no token: the model leaves them out, or writes one token for many."""
    vocabulary = model["vocab"]
    if path.is_byte_level:
        return bytes(b for character, b in BYTE_OF_CHARACTER.items() if character not in vocabulary)
    fallbacks = {f"<0x{byte:02X}>" for byte in range(256)}
    if not model["byte_fallback"] or not fallbacks <= vocabulary.keys():
        raise UnknownPath("characters without a token")
    return b""
