"""The OpenAPI document of the HTTP port, made from the types that bodies are decoded with.

`operations` is the table of what there is; a test holds it against the routes. Bounds that follow
from settings are those of this gateway.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline import __version__
from paceline.gateway import answer_types as answers
from paceline.gateway.config import GatewayConfig, RequestLimits
from paceline.gateway.guard import PUBLIC
from paceline.gateway.openai_types import (
    SAYS,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_TEXT, _JSON, _SSE = "text/plain", "application/json", "text/event-stream"
_KEY = "apiKey"
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "No key, or one that is not known.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    422: "Workers died of this request.",
    429: "Too many requests, of all or of this tenant.",
    431: "The head is too large.",
    500: "A fault of the server.",
    503: "Nobody can serve the request now.",
    504: "The request took too long.",
}
_ALWAYS = (400, 401, 431)
_POST = (*_ALWAYS, 404, 408, 413, 422, 429, 500, 503, 504)
_HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"WWW-Authenticate": "`Bearer`."},
    429: {"Retry-After": "Seconds."},
    503: {"Retry-After": "Seconds."},
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: type[answers.Shape] | None  # None: plain text
    errors: Sequence[int] = _ALWAYS
    body: type[Body] | None = None
    chunk: type[answers.Shape] | None = None  # with `stream`
    failure: str = ""  # of 503, where that is plain text

    @property
    def types(self) -> Iterator[type[msgspec.Struct]]:
        for found in (self.body, self.answer, self.chunk):
            if found is not None:
                yield found


def operations() -> list[Operation]:
    chat = answers.ChatCompletion, _POST, ChatRequest, answers.ChatCompletionChunk
    completion = answers.Completion, _POST, CompletionRequest, answers.CompletionChunk
    embeddings = answers.EmbeddingList, _POST, EmbeddingRequest
    card, model_errors = answers.ModelCard, (*_ALWAYS, 404, 503)
    return [
        Operation("post", "/v1/chat/completions", "Continue a conversation", *chat),
        Operation("post", "/v1/completions", "Continue a text", *completion),
        Operation("post", "/v1/embeddings", "Texts to vectors", *embeddings),
        Operation("post", "/tokenize", "Text to tokens", answers.Tokens, _POST, TokenizeRequest),
        Operation(
            "post", "/detokenize", "And back", answers.DetokenizedText, _POST, DetokenizeRequest
        ),
        Operation("get", "/v1/models", "Models that are served now", answers.ModelList),
        Operation("get", "/v1/models/{name}", "One of them", card, model_errors),
        Operation("get", "/livez", "Whether the process works", None, (400, 431)),
        Operation("get", "/readyz", "Whether it can serve", None, (400, 431), failure="Why not."),
        Operation("get", "/metrics", "Figures for Prometheus", None, (400, 431)),
        Operation("get", "/openapi.json", "This document", None),
    ]


def document(config: GatewayConfig) -> Schema:
    """OpenAPI 3.2, the first that can tell of the events of a stream, as objects of JSON."""
    found = [one for one in operations() if one.path != "/metrics" or not config.shares_ports]
    kinds: list[type[msgspec.Struct]] = [answers.ErrorBody]
    kinds += [kind for one in found for kind in one.types]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF + "{name}")
    schemas = {name: _said(schema) for name, schema in schemas.items()}
    for kind in kinds:
        if issubclass(kind, Body):
            _limit(schemas[kind.__name__]["properties"], kind.neutral, config.limits)
    has_keys = config.api_keys != Path()
    paths: dict[str, Schema] = {}
    for one in found:
        paths.setdefault(one.path, {})[one.method] = _described(one, has_keys=has_keys)
    components: Schema = {"schemas": schemas}
    if has_keys:
        components["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    about = {"title": "Paceline", "version": __version__, "license": {"name": "Apache-2.0"}}
    return {"openapi": "3.2.0", "info": about, "paths": paths, "components": components}


def _said(schema: Any) -> Any:
    """`schema` with what `says` said of it in its place."""
    if isinstance(schema, list):
        return [_said(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    own = {name: _said(value) for name, value in schema.items() if name != SAYS}
    said: Schema = schema.get(SAYS, {})
    return own | said


def _limit(properties: Schema, neutral: Mapping[str, Sequence[Any]], limits: RequestLimits) -> None:
    """By what the class of a body and the settings say."""
    for name, values in neutral.items():
        if name in properties:
            properties[name] = {"enum": [None, *values], "default": None}
    for name, limit in (
        ("stop", limits.max_stop_strings),
        ("prompt", limits.max_prompts),
        ("input", limits.max_embedding_inputs),
    ):
        for form in properties.get(name, {}).get("anyOf", []):
            if form.get("items", {}).get("type") in ("string", "array"):
                form["maxItems"] = limit


def _described(one: Operation, *, has_keys: bool) -> Schema:
    needs_key = has_keys and one.path not in PUBLIC
    errors = [status for status in one.errors if status != 401 or needs_key]
    described: Schema = {
        "summary": one.summary,
        "operationId": re.sub(r"\W+", "_", one.method + one.path).strip("_"),
        "responses": {"200": _success(one)} | {str(s): _failure(s) for s in sorted(errors)},
        "security": [{_KEY: []}] if needs_key else [],
    }
    if one.failure:
        plain = {_TEXT: {"schema": {"type": "string"}}}
        described["responses"]["503"] = {"description": one.failure, "content": plain}
    if one.body is not None:
        content = {_JSON: {"schema": _ref(one.body)}}
        described["requestBody"] = {"required": True, "content": content}
    if "{name}" in one.path:
        parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [parameter]
    return described


def _success(one: Operation) -> Schema:
    if one.path == "/openapi.json":
        return {"description": one.summary, "content": {_JSON: {"schema": {"type": "object"}}}}
    if one.answer is None:
        plain = {_TEXT: {"schema": {"type": "string"}}}
        return {"description": one.summary, "content": plain}
    content: Schema = {_JSON: {"schema": _ref(one.answer)}}
    if one.chunk is not None:
        content[_SSE] = {"itemSchema": _event(one.chunk)}
    return {"description": one.summary, "content": content}


def _event(chunk: type[answers.Shape]) -> Schema:
    """An event of a stream. A failure after the first one is an event, too."""
    inner = {"oneOf": [_ref(chunk), _ref(answers.ErrorBody)]}
    frame = {"type": "string", "contentMediaType": _JSON, "contentSchema": inner}
    data = {"anyOf": [{"const": "[DONE]"}, frame]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _failure(status: int) -> Schema:
    schema = {_JSON: {"schema": _ref(answers.ErrorBody)}}
    headers = {
        name: {"description": meaning, "required": True, "schema": {"type": "string"}}
        for name, meaning in _HEADERS.get(status, {}).items()
    }
    described: Schema = {"description": _ERRORS[status], "content": schema}
    return described | ({"headers": headers} if headers else {})


def _ref(kind: type[msgspec.Struct]) -> Schema:
    return {"$ref": _REF + kind.__name__}
