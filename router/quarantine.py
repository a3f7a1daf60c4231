"""Requests that are refused for a while, because workers died of them."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

import structlog

from paceline.core.errors import RequestQuarantined
from paceline.core.keys import HASH_BLOCK_TOKENS, KEY_BYTES
from paceline.router.request import Request, WorkerLife
from paceline.v1 import common_pb2, control_pb2

MAX_CAUGHT = 1024

log = structlog.stdlib.get_logger("paceline.router")


@dataclass(frozen=True, slots=True)
class Caught:
    """`until`: by the loop's clock."""

    unix_s: float
    until: float
    request_id: str
    killed: frozenset[WorkerLife]


class Quarantine:
    """By fingerprint: what equals a request is refused as it is."""

    def __init__(self) -> None:
        self._caught: OrderedDict[bytes, Caught] = OrderedDict()

    def check(self, request: Request) -> None:
        """Raises RequestQuarantined for what was caught before."""
        caught = self._caught.get(fingerprint(request)) if self._caught else None
        if caught is not None and _now() < caught.until:
            reason = f"{len(caught.killed)} workers died while they served this request"
            raise RequestQuarantined(f"{reason}: it is not tried again for a while")

    def catch(self, request: Request, killed: frozenset[WorkerLife], refused_s: float) -> None:
        name, until = fingerprint(request), _now() + refused_s
        self._caught[name] = Caught(time.time(), until, request.request_id, killed)
        while len(self._caught) > MAX_CAUGHT:
            self._caught.popitem(last=False)
        log.error(
            "request quarantined: workers died of it",
            request_ids=[request.request_id],
            fingerprint=name.hex(),
            killed=sorted(worker for worker, _ in killed),
            refused_s=refused_s,
        )

    def to_proto(self) -> list[control_pb2.QuarantinedRequest]:
        """Those that are refused now, the oldest first."""
        now = _now()
        return [
            control_pb2.QuarantinedRequest(
                unix_ms=round(caught.unix_s * 1000),
                fingerprint=name.hex(),
                request_id=caught.request_id,
                killed=[
                    common_pb2.WorkerLife(worker_id=w, incarnation=i) for w, i in caught.killed
                ],
                left_s=round(caught.until - now),
            )
            for name, caught in self._caught.items()
            if now < caught.until
        ]


def fingerprint(request: Request) -> bytes:
    """Of tenant and prompt: the last key stands for all tokens up to its block."""
    message, keys = request.message, request.block_keys
    num_keyed = len(keys) // KEY_BYTES * HASH_BLOCK_TOKENS
    rest = message.token_ids[num_keyed : message.num_prompt_tokens]
    name = hashlib.sha256(message.root_key)
    for part in (message.tenant.encode(), keys[-KEY_BYTES:], repr(list(rest)).encode()):
        name.update(len(part).to_bytes(8, "little") + part)
    return name.digest()[:16]


def _now() -> float:
    return asyncio.get_running_loop().time()
