"""Messages of a chat as templates expect them: text content, roles that models know."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.core.errors import InvalidRequest
from paceline.gateway.openai_types import ChatMessage, ContentPart, ToolCall


class TemplateFields(Protocol):
    """What a body says of the way from messages to a prompt."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    add_special_tokens: bool | None


@dataclass(frozen=True, slots=True)
class Chat:
    """Checked; `messages` have role and content, maybe name, tool_calls and tool_call_id."""

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
    called: set[str] = set()
    plain = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        role = "system" if message.role == "developer" and not has_developer else message.role
        plain.append({"role": role} | _plain(field, message, called))
    return Chat(plain, asks, continues, bool(fields.add_special_tokens))


def _plain(field: str, message: ChatMessage, called: set[str]) -> dict[str, Any]:
    """All but the role. `called`: ids of the calls so far."""
    if message.role == "function" or message.function_call:
        raise InvalidRequest(f"{field}.role", message.role, "write calls as tool_calls")
    plain: dict[str, Any] = {}
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidRequest(f"{field}.tool_calls", message.role, "only an assistant calls")
        plain["tool_calls"] = [
            _call(f"{field}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)
        ]
        called |= {call.id for call in message.tool_calls}
    if message.role == "tool":
        identity = message.tool_call_id or ""
        known = identity in called
        reason = "no message before it has a call with this id"
        InvalidRequest.check(f"{field}.tool_call_id", identity, known, reason)
        plain["tool_call_id"] = identity
    if message.name is not None:
        plain["name"] = message.name
    is_silent = message.content is None and bool(message.tool_calls)
    plain["content"] = "" if is_silent else _text(f"{field}.content", message.content)
    return plain


def _call(field: str, call: ToolCall) -> dict[str, Any]:
    """As templates expect it: with arguments that have been read."""
    try:
        arguments = json.loads(call.function.arguments)  # orjson makes floats of long numbers
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        reason = "must be the text of a JSON object"
        raise InvalidRequest(f"{field}.function.arguments", call.function.arguments, reason)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


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
