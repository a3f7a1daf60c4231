"""One of several processes of a gateway: `python -m paceline.gateway.sibling`.

Its parent tells on standard input what it is, and hears on standard output, in one line of JSON,
that it listens or why it cannot; then a byte a second while its event loop goes on.
"""

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import ConfigError
from paceline.gateway.config import GatewayConfig
from paceline.gateway.usage import SharedUsages

EXIT_CANNOT_START = 2


class Sibling(msgspec.Struct):
    config: GatewayConfig
    number: int
    usage_fd: int

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self, enc_hook=_text_of)


class Report(msgspec.Struct):
    """Without an error it listens."""

    error: str = ""
    field: str | None = None


def report_of(line: bytes) -> Report | None:
    """None: it ended without one."""
    return msgspec.json.decode(line, type=Report) if line.endswith(b"\n") else None


def main() -> int:
    raw = sys.stdin.buffer.read()
    sibling = msgspec.msgpack.decode(raw, type=Sibling, dec_hook=_path_of)
    parent = _Parent()
    from paceline.gateway.main import Place, run  # 0.5 s, in which our parent need not wait

    usages = SharedUsages(sibling.usage_fd, sibling.number)
    place = Place(sibling.number, usages, lambda: parent.tell(Report()), parent.beat)
    try:
        return run(sibling.config, place)
    except ConfigError as error:
        parent.tell(Report(error.message, error.field))
        return EXIT_CANNOT_START


class _Parent:
    """Takes standard output for itself: who prints from now on is heard on standard error."""

    def __init__(self) -> None:
        self._pipe = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(self, report: Report) -> None:
        os.write(self._pipe, msgspec.json.encode(report) + b"\n")

    def beat(self) -> None:
        os.write(self._pipe, b".")


def _text_of(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value)} is no setting")


def _path_of(kind: type, value: Any) -> Any:
    return kind(value)


if __name__ == "__main__":
    sys.exit(main())
