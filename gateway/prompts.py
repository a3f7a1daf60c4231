"""From texts to prompts: refused if they cannot fit, tokenised, then hashed, off the event loop.

A text that is much too long is refused before it is tokenised, and no prompt is hashed before its
length is known to fit. Of a long text only the copying of its tokens holds the interpreter's lock.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from paceline.core.errors import InvalidRequest
from paceline.core.keys import chain_keys, root_key, tenant_salt
from paceline.core.sampling import SamplingParams
from paceline.gateway.bad_words import bad_word_ids
from paceline.gateway.context_room import ContextRoom
from paceline.gateway.jobs import DEFAULT_TENANT, Prompt
from paceline.gateway.lanes import SHORT_CHARS, Lanes
from paceline.gateway.tokenizer import TextModel
from paceline.v1.control_pb2 import ModelInfo

_SHORT_CHAT = 512  # messages; a template takes some 30 us for each

Content = str | list[int]  # token ids


class Prompts:
    """Of one gateway. All ways raise InvalidRequest, those to a prompt ContextLengthExceeded."""

    def __init__(self, text: TextModel, secret: str) -> None:
        self._text = text
        self._salt = tenant_salt(secret.encode(), DEFAULT_TENANT)
        self._lanes = Lanes()

    async def of_chat(
        self, messages: Sequence[Mapping[str, Any]], model: ModelInfo, room: ContextRoom
    ) -> Prompt:
        """`messages` as the model's template expects them."""

        def begin() -> Prompt | str:
            text = self._text.render(messages)
            if len(text) <= SHORT_CHARS:
                return self._of_rendered(text, model, room)
            self._check_length(text, room)
            return text

        is_short = len(messages) <= _SHORT_CHAT
        begun = await (self._lanes.short if is_short else self._lanes.long)(begin)
        if isinstance(begun, Prompt):
            return begun
        return await self._lanes.long(partial(self._of_rendered, begun, model, room))

    async def of_contents(
        self, contents: Sequence[Content], model: ModelInfo, room: ContextRoom
    ) -> list[Prompt]:
        """One prompt for each; all lengths are judged before the first is tokenised."""
        if any(not content for content in contents):
            raise InvalidRequest("prompt", "", "must not be empty")
        if sum(map(len, contents)) > SHORT_CHARS:
            await self._lanes.short(partial(self._check_lengths, contents, room))
        prompts = []
        for content in contents:
            lane = self._lanes.short if len(content) <= SHORT_CHARS else self._lanes.long
            prompts.append(await lane(partial(self._of_content, content, model, room)))
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
        lane = self._lanes.short if num_chars <= SHORT_CHARS else self._lanes.long
        return await lane(extended)

    def close(self) -> None:
        self._lanes.close()

    def _check_lengths(self, contents: Sequence[Content], room: ContextRoom) -> None:
        for content in contents:
            self._check_length(content, room)

    def _check_length(self, content: Content, room: ContextRoom) -> None:
        if isinstance(content, str):
            enough = room.max_prompt_tokens + 1
            room.check(self._text.least_tokens(content, enough), is_least=True)
        else:
            room.check(len(content))

    def _of_rendered(self, text: str, model: ModelInfo, room: ContextRoom) -> Prompt:
        return self._hashed(self._text.encode(text, room.check, is_rendered=True), model)

    def _of_content(self, content: Content, model: ModelInfo, room: ContextRoom) -> Prompt:
        if isinstance(content, str):
            token_ids = self._text.encode(content, room.check)
        else:
            token_ids = content
            room.check(len(token_ids))
            _check_token_ids(token_ids, model)
        if self._text.is_only_special(token_ids):
            raise InvalidRequest("prompt", content, "must hold more than special tokens")
        return self._hashed(token_ids, model)

    def _hashed(self, token_ids: list[int], model: ModelInfo) -> Prompt:
        root = root_key(model.content_digest, self._salt)
        return Prompt(token_ids, root, b"".join(chain_keys(root, token_ids)))


def _check_token_ids(token_ids: list[int], model: ModelInfo) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            reason = f"token ids must lie between 0 and {model.vocab_size - 1}"
            raise InvalidRequest("prompt", token_id, reason)
