"""From texts to prompts: refused if they cannot fit, tokenised, then hashed, off the event loop.

A text that is much too long is refused before it is tokenised, and no prompt is hashed before its
length is known to fit. Of a long text only the copying of its tokens holds the interpreter's lock.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from paceline.core.errors import InvalidRequest
from paceline.core.keys import chain_keys, root_key
from paceline.core.sampling import SamplingParams
from paceline.gateway.bad_words import bad_word_ids
from paceline.gateway.contents import Content
from paceline.gateway.context_room import Room
from paceline.gateway.jobs import Prompt
from paceline.gateway.lanes import SHORT_CHARS, Lanes
from paceline.gateway.messages import Chat
from paceline.gateway.tokenizer import TextModel
from paceline.v1.control_pb2 import ModelInfo

_SHORT_CHAT = 512  # messages; a template takes some 30 us for each

T = TypeVar("T")


class Prompts:
    """Of one gateway. All ways raise InvalidRequest, those to a prompt ContextLengthExceeded."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._lanes = Lanes()

    async def of_chat(self, chat: Chat, model: ModelInfo, room: Room, salt: bytes) -> Prompt:
        def finish(text: str) -> Prompt:
            ids = self._text.encode(text, room.check, adds_special=chat.adds_special)
            reason = "the chat template makes nothing of them"
            InvalidRequest.check(room.prompt_field, "0 tokens", bool(ids), reason)
            return _hashed(ids, model, salt)

        return await self._rendered(chat, finish, partial(self._check_length, room=room))

    async def ids_of_chat(self, chat: Chat) -> list[int]:
        """Of any length, as `of_chat` finds them."""

        def finish(text: str) -> list[int]:
            return self._text.encode(text, _any_length, adds_special=chat.adds_special)

        return await self._rendered(chat, finish, lambda text: None)

    async def ids_of_text(self, text: str, *, adds_special: bool) -> list[int]:
        """Of any length."""
        encode = partial(self._text.encode, text, _any_length, adds_special=adds_special)
        return await self.work(encode, len(text))

    async def shown_texts(self, contents: Sequence[Content], *, skip_special: bool) -> list[str]:
        """Of prompts, as an answer shows them."""
        show = partial(self._text.shown_text, skip_special=skip_special)
        return [
            c if isinstance(c, str) else await self.work(partial(show, c), len(c)) for c in contents
        ]

    async def work(self, work: Callable[[], T], num_chars: int) -> T:
        """Off the event loop; `num_chars` or tokens say how long it takes."""
        lane = self._lanes.short if num_chars <= SHORT_CHARS else self._lanes.long
        return await lane(work)

    async def _rendered(
        self, chat: Chat, finish: Callable[[str], T], check_long: Callable[[str], None]
    ) -> T:
        """What `finish` makes of the chat's text, which it gets in its turn if that is long."""

        def begin() -> tuple[str, T | None]:
            text = self._text.render(chat)
            if len(text) <= SHORT_CHARS:
                return text, finish(text)
            check_long(text)
            return text, None

        is_short = len(chat.messages) <= _SHORT_CHAT
        text, made = await (self._lanes.short if is_short else self._lanes.long)(begin)
        return made if made is not None else await self._lanes.long(partial(finish, text))

    async def of_contents(
        self,
        contents: Sequence[Content],
        model: ModelInfo,
        room: Room,
        salt: bytes,
        *,
        adds_special: bool = True,
    ) -> list[Prompt]:
        """One prompt for each; all lengths are judged before the first is tokenised. Texts get the
        tokenizer's special tokens unless `adds_special` is False."""
        if any(not content for content in contents):
            raise InvalidRequest(room.prompt_field, "", "must not be empty")
        if sum(map(len, contents)) > SHORT_CHARS:
            await self._lanes.short(partial(self._check_lengths, contents, room))
        prompts = []
        for content in contents:
            ids_of = partial(self._ids_of, content, model, room, adds_special=adds_special)
            prompts.append(await self.work(partial(_made, ids_of, model, salt), len(content)))
        return prompts

    async def with_bad_words(
        self, params: SamplingParams, words: Sequence[str], model: ModelInfo
    ) -> SamplingParams:
        """`words`, which are checked, beside the token sequences that may not come already."""
        if not words:
            return params

        def extended() -> SamplingParams:
            ids = bad_word_ids(self._text, words) + params.bad_words
            found = dataclasses.replace(params, bad_words=ids)
            found.check_ids(model.vocab_size)
            return found

        num_chars = 2 * sum(map(len, words))  # each behind a space, too
        return await self.work(extended, num_chars)

    def close(self) -> None:
        self._lanes.close()

    def _check_lengths(self, contents: Sequence[Content], room: Room) -> None:
        for content in contents:
            self._check_length(content, room)

    def _check_length(self, content: Content, room: Room) -> None:
        if isinstance(content, str):
            enough = room.max_prompt_tokens + 1
            room.check(self._text.least_tokens(content, enough), is_least=True)
        else:
            room.check(len(content))

    def _ids_of(
        self, content: Content, model: ModelInfo, room: Room, *, adds_special: bool
    ) -> list[int]:
        if isinstance(content, str):
            token_ids = self._text.encode(content, room.check, adds_special=adds_special)
        else:
            token_ids = content
            room.check(len(token_ids))
            _check_token_ids(token_ids, model, room.prompt_field)
        if self._text.is_only_special(token_ids):
            reason = "must hold more than special tokens"
            raise InvalidRequest(room.prompt_field, content, reason)
        return token_ids


def _made(ids_of: Callable[[], list[int]], model: ModelInfo, salt: bytes) -> Prompt:
    return _hashed(ids_of(), model, salt)


def _hashed(token_ids: list[int], model: ModelInfo, salt: bytes) -> Prompt:
    root = root_key(model.content_digest, salt)
    return Prompt(token_ids, root, b"".join(chain_keys(root, token_ids)))


def _any_length(num_tokens: int) -> None:
    """Refuses nothing."""


def _check_token_ids(token_ids: list[int], model: ModelInfo, field: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            reason = f"token ids must lie between 0 and {model.vocab_size - 1}"
            raise InvalidRequest(field, token_id, reason)
