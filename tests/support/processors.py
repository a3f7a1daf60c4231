"""Logits processors of an installed package. `json` lets a byte model write nothing but
{"a":<int>,"b":[<int>,…]}: a matcher of a grammar whose state is the output so far. `deadly` ends
its rank."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.engine.logits_processors import ProcessorRow
from tests.support.mock_model import EOS_TOKEN_ID

HEAD, MIDDLE, END = b'{"a":', b',"b":[', b"]}"
MAX_DIGITS = 3
NUM_ITEMS = 6  # of b
DIGITS = tuple(b"123456789")


def allowed_after(text: bytes) -> tuple[int, ...]:
    """The tokens that may follow: of nothing, the first byte."""
    if text.endswith(END):
        return (EOS_TOKEN_ID,)
    if len(text) < len(HEAD):
        return (HEAD[len(text)],)
    rest = text[len(HEAD) :]
    number, comma, tail = rest.partition(b",")
    if not comma:
        return _number(number, MIDDLE[:1])
    begun = MIDDLE[1:]
    if len(tail) < len(begun):
        return (begun[len(tail)],)
    if tail.endswith(END[:1]):
        return (END[1],)
    items = tail[len(begun) :].split(b",")
    return _number(items[-1], b"," if len(items) < NUM_ITEMS else END[:1])


def _number(digits: bytes, end: bytes) -> tuple[int, ...]:
    if not digits:
        return DIGITS
    return tuple(end) if len(digits) >= MAX_DIGITS else (*DIGITS, *end)


class Grammar:
    def __init__(self, vocab_size: int) -> None: ...

    def prepare(self, arguments: dict[str, Any]) -> None: ...

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> None:
        for scores, row in zip(logits, rows, strict=True):
            ids = list(allowed_after(bytes(row.output.tolist())))
            kept = scores[ids].clone()
            scores.fill_(-torch.inf)
            scores[ids] = kept


class Deadly:
    """Of requests with `at`, once they have so many tokens."""

    def __init__(self, vocab_size: int) -> None: ...

    def prepare(self, arguments: dict[str, Any]) -> int:
        return int(arguments["at"])

    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> None:
        if any(len(row.output) >= row.prepared for row in rows):
            os.kill(os.getpid(), signal.SIGKILL)


def write_package(folder: Path) -> str:
    """What pip leaves of a package that offers them. Returns PYTHONPATH with it."""
    info = folder / "processors-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: processors\nVersion: 1.0\n")
    points = f"json = {__name__}:Grammar\ndeadly = {__name__}:Deadly\n"
    (info / "entry_points.txt").write_text(f"[paceline.logits_processors]\n{points}")
    root = str(Path(__file__).parents[2])
    return os.pathsep.join([str(folder), root, *filter(None, [os.environ.get("PYTHONPATH", "")])])
