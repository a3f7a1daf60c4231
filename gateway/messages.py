"""Messages of a chat as templates expect them: text content, roles that models know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.errors import InvalidRequest
from paceline.gateway.openai_types import ChatMessage, ContentPart


class TemplateFields(Protocol):
    """What a body says of the way from messages to a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    add_special_tokens: bool | None


@dataclass(frozen=True, slots=True)
class Chat:
    """Checked; `messages` have role, content and maybe name."""

    messages: Sequence[Mapping[str, Any]]
    asks_for_answer: bool = True  # the text ends with the head of the assistant's turn
    continues_last: bool = False  # the text ends with that of the last message
    adds_special: bool = False  # tokens, beside those that the template writes


def chat_of(messages: list[ChatMessage], fields: TemplateFields, *, has_developer: bool) -> Chat:
    """`has_developer`: the template tells that role from "system". Raises InvalidRequest."""
    continues = bool(fields.continue_final_message)
    asks = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    if continues and asks:
        reason = "excludes add_generation_prompt"
        raise InvalidRequest("continue_final_message", continues, reason)
    if not messages:
        raise InvalidRequest("messages", [], "must not be empty")
    plain = [
        _plain(f"messages[{index}]", message, has_developer=has_developer)
        for index, message in enumerate(messages)
    ]
    return Chat(plain, asks, continues, bool(fields.add_special_tokens))


def _plain(field: str, message: ChatMessage, *, has_developer: bool) -> dict[str, Any]:
    if message.role in ("tool", "function"):
        raise InvalidRequest(f"{field}.role", message.role, "tools are not supported yet")
    if message.tool_calls:
        raise InvalidRequest(f"{field}.tool_calls", "…", "tools are not supported yet")
    if message.function_call:
        raise InvalidRequest(f"{field}.function_call", "…", "tools are not supported yet")
    role: str = message.role
    if role == "developer" and not has_developer:
        role = "system"
    content = {"role": role, "content": _text(f"{field}.content", message.content)}
    return content if message.name is None else content | {"name": message.name}


def _text(field: str, content: str | list[ContentPart] | None) -> str:
    """Parts are joined by line ends: templates of text models expect one string."""
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(field, content, "must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if part.type != "text" or part.text is None:
            reason = "only text parts are supported by this model"
            raise InvalidRequest(f"{field}[{index}].type", part.type, reason)
        texts.append(part.text)
    return "\n".join(texts)
