"""Text to token ids as Hugging Face does it, without importing transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from paceline.core.errors import ConfigError, InvalidRequest
from paceline.core.model_files import eos_token_ids, read_json
from paceline.core.serving_digest import serving_digest
from paceline.gateway.chat_template import load_template
from paceline.gateway.config import GatewayConfig
from paceline.gateway.detokenizer import (
    ByteLevelDetokenizer,
    ByteTable,
    Detokenizer,
    WindowDetokenizer,
)
from paceline.gateway.messages import Chat
from paceline.gateway.token_bound import TokenBound

_MAX_CHARACTER_BYTES = 4
_CONTEXT_TOKENS = 4  # of the prompt, so that a first output token keeps its leading space


class TextModel:
    """What a gateway knows of a model: tokenizer, chat template, ids that end a text."""

    def __init__(self, config: GatewayConfig) -> None:
        tokenizer_config, limits = _tokenizer_config(config.model), config.limits
        self.digest = serving_digest(config.model)
        self._tokenizer = _load_tokenizer(config.model / "tokenizer.json")
        self._template = load_template(
            config.model, tokenizer_config, limits.max_rendered_chars, limits.render_timeout_s
        )
        self.eos_token_ids = frozenset(eos_token_ids(config.model))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._table = ByteTable(self._tokenizer, self._special_ids)
        self._bound = TokenBound(self._tokenizer)
        self._is_byte_level = isinstance(self._tokenizer.decoder, ByteLevel)

    @property
    def has_developer_role(self) -> bool:
        """Whether the chat template tells "developer" from "system"."""
        return self._template is not None and self._template.knows_developer

    def least_tokens(self, text: str, enough: int) -> int:
        """At least so many tokens has `text`; quick, and counts no further than to `enough`."""
        return self._bound.least_tokens(text, enough)

    def encode(
        self, text: str, check_length: Callable[[int], None], *, adds_special: bool = True
    ) -> list[int]:
        """Token ids, whose number `check_length` may refuse by raising.

        A rendered chat carries its special tokens in the text: none are added to it.
        """
        # Not encode(): it keeps the interpreter's lock, so a long text would stop the event loop.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=adds_special)
        check_length(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def encode_words(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of pieces of text: no special tokens are added."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        # Not decode(): it keeps the interpreter's lock, as encode() does.
        (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)
        return str(text)

    def shown_text(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """The text that an answer of `token_ids` would have."""
        detokenizer = self.detokenizer((), skip_special=skip_special)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def token_names(self, token_ids: Sequence[int]) -> list[str]:
        """As the vocabulary writes them."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def render(self, chat: Chat) -> str:
        """The chat's text. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest("messages", "…", "this model has no chat template")
        return self._template.render(chat)

    def is_only_special(self, token_ids: Sequence[int]) -> bool:
        """Whether there is no text in `token_ids`."""
        return self._special_ids.issuperset(token_ids)

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special: bool = True) -> Detokenizer:
        """For one choice that continues `prompt_ids`."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._table, skip_special=skip_special)
        context = self._end_of(prompt_ids)
        return WindowDetokenizer(self._tokenizer, context, skip_special=skip_special)

    def _end_of(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The last ones, from the beginning of a character on: decoders give up all bytes of a row
        that begins in the middle of one, those of the answer too."""
        start = max(0, len(token_ids) - _CONTEXT_TOKENS)
        for _ in range(_MAX_CHARACTER_BYTES - 1):
            if start and _is_continuation(self._tokenizer.id_to_token(token_ids[start])):
                start -= 1
        return token_ids[start:]

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token by itself, special tokens by their name (for logprobs)."""
        if self._is_byte_level:
            return self._table.raw(token_id)
        piece = self._tokenizer.id_to_token(token_id) or ""
        if (byte := _fallback_byte(piece)) is not None:
            return bytes((byte,))
        return piece.replace("\u2581", " ").encode()


def _fallback_byte(piece: str) -> int | None:
    """Of a piece such as <0xF0>, which stands for a byte; None: it is another."""
    is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
    return int(piece[3:5], 16) if is_byte else None


def _is_continuation(piece: str | None) -> bool:
    """Whether it is a byte of UTF-8 that cannot be a character's first one."""
    byte = _fallback_byte(piece or "")
    return byte is not None and 0x80 <= byte < 0xC0


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError("model", path.name, f"cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokenizer_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}
