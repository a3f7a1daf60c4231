"""ASGI messages of an answer."""

import secrets

from starlette.types import Send

_MAX_CALLER_ID = 128


async def send_start(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], num_bytes: int | None
) -> None:
    """JSON of `num_bytes`, or an event stream if that is None."""
    if num_bytes is None:
        kind = [(b"content-type", b"text/event-stream; charset=utf-8")]
        kind += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    else:
        kind = [(b"content-type", b"application/json")]
        kind += [(b"content-length", b"%d" % num_bytes)]
    message = {"type": "http.response.start", "status": status, "headers": kind + headers}
    await send(message)


async def send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def caller_id_header(caller_id: bytes | None) -> tuple[bytes, bytes]:
    """x-request-id: the caller's if it is printable and short, only echoed; else a random one."""
    is_short = caller_id is not None and 0 < len(caller_id) <= _MAX_CALLER_ID
    if caller_id is not None and is_short and all(0x20 < byte < 0x7F for byte in caller_id):
        return (b"x-request-id", caller_id)
    return (b"x-request-id", secrets.token_hex(16).encode())
