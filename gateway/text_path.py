"""What stands between a text and the model of its tokenizer, as far as lengths are concerned.

A tokenizer cuts out its added tokens, normalizes what is left and splits it. Some of these steps
drop text, in others a character's neighbours decide. The ones below neither drop nor surprise; with
any other, nothing can be said about a text before it is tokenised.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, cast

from tokenizers import Tokenizer

Part = Mapping[str, Any]
Step = Callable[[str], str | None]  # None: this text's way is not known
Form = Literal["NFC", "NFD", "NFKC", "NFKD"]

_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_SPACE = "\u2581"  # SentencePiece writes it for a space
# Scripts are still added here, so libraries may differ on which characters are composed.
_GROWING_PLANE = re.compile("[\U00010000-\U0001efff]")


class UnknownPath(Exception):
    """The tokenizer has a part whose effect is not known."""


class TextPath:
    """Made from a tokenizer's JSON. Raises UnknownPath."""

    def __init__(self, tokenizer: Tokenizer, description: Part) -> None:
        self._normalizer = tokenizer.normalizer
        self._added: list[Part] = description["added_tokens"]
        self._stripping = _stripping(self._added)
        self._steps = list(_normalizing(description["normalizer"]))
        self.is_byte_level = False
        for part in _flat(description["pre_tokenizer"], "pretokenizers"):
            self._add_splitting(part)

    def seen(self, text: str) -> str | None:
        """The text that the model cuts into tokens, or less of it; None if that is not known.

        Less: spaces around added tokens that may swallow them. Spaces that some tokenizers put
        before a text are left out, too.
        """
        for content in self._stripping:
            if content in text:
                text = content.join(piece.strip() for piece in text.split(content))
        return self._after_steps(text)

    def added_tokens(self) -> set[bytes]:
        """As they may stand in what `seen` returns."""
        contents = {token["content"] for token in self._added}
        seen = {self._after_steps(content) or content for content in contents}
        if self._normalizer is not None:
            seen |= {self._normalizer.normalize_str(content) for content in contents}
        return {content.encode() for content in contents | seen}

    def _after_steps(self, text: str) -> str | None:
        for step in self._steps:
            after = step(text)
            if after is None:
                return None
            text = after
        return text

    def _add_splitting(self, part: Part) -> None:
        kind = part["type"]
        if self.is_byte_level and kind in ("ByteLevel", "Metaspace"):
            raise UnknownPath(kind)
        if kind == "ByteLevel":
            self.is_byte_level = True
        elif kind == "Metaspace":
            self._steps.append(partial(_replaced, " ", part["replacement"]))
        elif kind in ("Split", "Punctuation"):
            if part["behavior"] == "Removed":
                raise UnknownPath(kind)
        elif kind not in ("Digits", "UnicodeScripts", "FixedLength"):
            raise UnknownPath(kind)


def _normalizing(normalizer: Part | None) -> Iterator[Step]:
    for part in _flat(normalizer, "normalizers"):
        kind = part["type"]
        if kind in _FORMS:
            yield partial(_unless_changed, cast(Form, kind))
        elif kind == "Replace" and len(part["pattern"].get("String", "")) == 1:
            yield partial(_replaced, part["pattern"]["String"], part["content"])
        elif kind != "Prepend" or part["prepend"] != _SPACE:
            raise UnknownPath(kind)


def _flat(part: Part | None, children: str) -> Iterator[Part]:
    """The parts of nested sequences, in order."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for child in part[children]:
        yield from _flat(child, children)


def _stripping(added: list[Part]) -> list[str]:
    """Contents of the added tokens that swallow spaces beside them."""
    found = [token for token in added if token["lstrip"] or token["rstrip"]]
    for token in found:
        num_holders = sum(token["content"] in other["content"] for other in added)
        if token["single_word"] or token["normalized"] or num_holders > 1:
            raise UnknownPath(token["content"])
    return [token["content"] for token in found]


def _unless_changed(form: Form, text: str) -> str | None:
    """A part of a normalized text is normalized: so are then the pieces between added tokens."""
    if text.isascii():
        return text
    is_known = unicodedata.is_normalized(form, text) and not _GROWING_PLANE.search(text)
    return text if is_known else None


def _replaced(character: str, content: str, text: str) -> str:
    return text.replace(character, content)
