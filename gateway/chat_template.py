"""Chat templates, rendered as transformers does, in a sandbox, within bounds of size and time."""

import dataclasses
import json
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.core.errors import ConfigError, InvalidRequest
from paceline.gateway.messages import Chat

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_CUT = "PACELINE_CUTS_HERE "  # a template may trim the space, which shows that it trims


class ChatTemplate:
    """A model's template with its special tokens. Thread-safe."""

    def __init__(
        self, source: str, variables: Mapping[str, str], max_chars: int, timeout_s: float
    ) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError("chat_template", str(error), "is not a valid template") from error
        self._variables = dict(variables)
        self._max_chars = max_chars
        self._timeout_s = timeout_s
        self.knows_developer = "developer" in source

    def render(self, chat: Chat) -> str:
        """The prompt's text. Raises InvalidRequest when the template refuses the messages."""
        if not chat.continues_last:
            return self._render(chat)
        last = {**chat.messages[-1], "content": chat.messages[-1]["content"] + _CUT}
        marked = dataclasses.replace(chat, messages=[*chat.messages[:-1], last])
        before, mark, after = self._render(marked).rpartition(_CUT.rstrip())
        if not mark:
            raise _refused("the template leaves the last message out: it cannot be continued")
        return before if after.startswith(" ") else before.rstrip()

    def _render(self, chat: Chat) -> str:
        pieces: list[str] = []
        num_chars = 0
        deadline = time.monotonic() + self._timeout_s
        try:
            for piece in self._template.generate(
                messages=chat.messages,
                tools=None,
                add_generation_prompt=chat.asks_for_answer,
                **self._variables,
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > self._max_chars:
                    raise _refused(f"the text exceeds {self._max_chars} characters")
                if time.monotonic() > deadline:
                    raise _refused(f"rendering took longer than {self._timeout_s:g} s")
        except jinja2.TemplateError as error:
            raise _refused(str(error)) from error
        except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise _refused(f"the template cannot render them ({type(error).__name__})") from error
        return "".join(pieces)


def load_template(
    model_dir: Path, tokenizer_config: Mapping[str, Any], max_chars: int, timeout_s: float
) -> ChatTemplate | None:
    """The template of a model directory, or None if it has none."""
    source = _template_source(model_dir, tokenizer_config)
    if source is None:
        return None
    variables = {}
    for name in _SPECIAL_TOKENS:
        token = tokenizer_config.get(name)
        if isinstance(token, Mapping):  # a serialized AddedToken
            token = token.get("content")
        if isinstance(token, str):
            variables[name] = token
    return ChatTemplate(source, variables, max_chars, timeout_s)


def _template_source(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, chat_template.json, tokenizer_config.json: the first that has one."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    path = model_dir / "chat_template.json"
    found = tokenizer_config.get("chat_template")
    if path.is_file():
        found = json.loads(path.read_text()).get("chat_template")
    if isinstance(found, list):  # several, named
        named = {entry["name"]: entry["template"] for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _refused(reason: str) -> InvalidRequest:
    error = InvalidRequest("messages", "…", reason)
    error.message = f"The chat template refuses these messages: {reason}"
    return error


class GenerationBlock(Extension):
    """{% generation %} marks what an assistant wrote, for training: rendering shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; models are trained without that."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
