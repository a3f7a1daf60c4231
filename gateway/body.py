"""A request's body: bounded while it arrives, decoded strictly, errors with the field's name."""

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope

from paceline.core.errors import Cancelled, InvalidRequest
from paceline.gateway.errors import BodyTooLarge, BodyTooSlow
from paceline.gateway.openai_types import Body

R = TypeVar("R", bound=Body)

_MAX_CHARS = 100  # of a caller's own words in our answer
_UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`")
_TOO_LONG = re.compile(r"^Expected `int` [<>]= |^Integer value out of range")
_AT = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)`$")
_BYTE = re.compile(r"\(byte (\d+)\)")
_NO_NUMBER = re.compile(rb'"([a-z_]{1,64})"\s*:\s*(-?(?:NaN|Infinity))')  # that JSON has
_MISSING = re.compile(r"missing required field `(.*?)`")


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises BodyTooLarge before more than `max_bytes` are held."""
    _check_length(scope, max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client left")
                body += message.get("body", b"")
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise BodyTooSlow("body", len(body), f"did not arrive within {timeout_s:g} s") from None


async def discard_body(receive: Receive, max_bytes: int, timeout_s: float) -> None:
    """Reads on for a while after a refusal: a client that still sends would miss the answer."""
    num_bytes = 0
    try:
        async with asyncio.timeout(timeout_s):
            while num_bytes < max_bytes:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def decode(decoder: "msgspec.json.Decoder[R]", body: bytes) -> R:
    """The request. Raises InvalidRequest for whatever is wrong with the JSON or its types."""
    try:
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _no_number(str(error), body) or _invalid_body(
            f"is not valid JSON in UTF-8: {error}"
        ) from None
    except RecursionError:
        raise _invalid_body("is nested too deeply") from None
    for name, neutral in request.neutral.items():
        value = getattr(request, name)
        if value is not None and not any(_is_same(value, allowed) for allowed in neutral):
            raise InvalidRequest(name, value, "is not supported")
    return request


def _is_same(value: object, allowed: object) -> bool:
    """As JSON has it: false is no number."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _check_length(scope: Scope, max_bytes: int) -> None:
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > max_bytes:
            raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge("body", "…", f"must not exceed {max_bytes} bytes")


def _invalid_body(reason: str) -> InvalidRequest:
    error = InvalidRequest("body", "…", reason)
    error.message, error.field = f"The request body {reason}.", None
    return error


def _no_number(text: str, body: bytes) -> InvalidRequest | None:
    """For a field with a value that Python's json writes and JSON does not have."""
    place = _BYTE.search(text)
    if place is None:
        return None
    for found in _NO_NUMBER.finditer(body):
        if found.start(2) <= int(place[1]) <= found.end(2):
            name, value = (group.decode() for group in found.groups())
            return InvalidRequest(name, value, "is no number in JSON")
    return None


def _invalid_field(text: str) -> InvalidRequest:
    """msgspec's message in OpenAI's words, with the field as `param`."""
    error = InvalidRequest("body", "…", "")
    place = _AT.search(text)
    error.field = place.group(1)[:_MAX_CHARS] if place else None
    if unknown := _UNKNOWN_FIELD.search(text):
        error.field = unknown.group(1)[:_MAX_CHARS]
        error.message = f"Unrecognized request argument supplied: {error.field}"
    elif missing := _MISSING.search(text):
        name = missing.group(1)
        error.field = f"{error.field}.{name}" if error.field else name
        error.message = f"Missing required parameter: '{error.field}'."
    elif _TOO_LONG.search(text):
        error.message = f"Invalid value for '{error.field}': must fit in 64 bits with its sign."
        error.field = str(error.field).partition("[")[0]
    else:
        what = f"'{error.field}'" if error.field else "the request body"
        error.message = f"Invalid type for {what}: {_AT.sub('', text)[:_MAX_CHARS]}."
    return error
