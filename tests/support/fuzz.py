"""Requests that nobody would send: broken bytes, odd values, connections that end anywhere.

All of them follow from a random.Random.
"""

import json
import random
from copy import deepcopy
from typing import Any

from tests.support.gateway_client import request_bytes

HI = [
    {"role": "user", "content": "Hi"},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"model": "mock", "messages": HI, "max_tokens": 4}),
    (
        "/v1/chat/completions",
        {
            "model": "mock",
            "messages": HI,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
        },
    ),
    (
        "/v1/completions",
        {"model": "mock", "prompt": "Hi", "stop": ["a", "b"], "logit_bias": {"3": 1}},
    ),
    (
        "/v1/completions",
        {"model": "mock", "prompt": [[1, 2], [3]], "stream": True, "echo": True, "logprobs": 1},
    ),
    ("/v1/completions", {"model": "mock", "prompt": ["a"], "best_of": 3, "prompt_logprobs": 1}),
    (
        "/v1/completions",
        {
            "model": "mock",
            "prompt": "Hi",
            "logits_processors": [{"name": "allowed_token_ids", "arguments": {"token_ids": [3]}}],
            "bad_words": ["x"],
        },
    ),
    ("/v1/embeddings", {"model": "mock", "input": ["Hi", "a"], "dimensions": 3}),
    (
        "/v1/embeddings",
        {"model": "mock", "input": [1, 2], "encoding_format": "base64", "pooling": "mean"},
    ),
    ("/tokenize", {"messages": HI, "add_generation_prompt": True}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/detokenize", {"tokens": [72, 105, 257]}),
]
FIELDS = sorted({name for _, body in BODIES for name in body}) + [
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "min_tokens", "cache_salt"),
    *("priority", "stop_token_ids", "user", "metadata", "tools", "response_format", "suffix"),
    *("presence_penalty", "repetition_penalty", "stream_options", "ignore_eos", "nonsense"),
]
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        -(2**63),
        2**64,
        10**400,
        0.0,
        -0.0,
        1e-320,
        1e308,
    ),
    *(float("nan"), float("inf"), "", "a", "\0", "\ud800", "\u0301" * 50, "\U0001f600", "x" * 5000),
    *([], {}, [[]], [None], {"": None}, [0] * 1000, [[1]] * 100, {"type": "text"}, "<|end|>"),
]
WORDS = [
    *(b"\r\n", b"\n", b"\0", b"\r\n\r\n", b" ", b":", b"GET ", b"POST ", b"HTTP/1.1", b"HTTP/1.0"),
    *(b"content-length: 5\r\n", b"content-length: -1\r\n", b"transfer-encoding: chunked\r\n"),
    *(
        b"connection: close\r\n",
        b"expect: 100-continue\r\n",
        b"upgrade: h2c\r\nconnection: upgrade\r\n",
    ),
    *(
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"5;x=y\r\nhello\r\n",
        b"\xff\xfe",
        b"\xc3\x28",
        b"%00",
        b"%",
    ),
    *(b"x-request-id: \x01\r\n", b"authorization: Bearer x\r\n", b"x-paceline-statistics: 1\r\n"),
    *(
        b"{",
        b"[" * 500,
        b'"',
        b"\\ud800",
        b"1e999",
        b"-",
        b"null",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ),
]
PATHS = [
    *{path for path, _ in BODIES},
    "/v1/models",
    "/v1/models/mock",
    "/metrics",
    "/openapi.json",
]


def connection(chance: random.Random) -> list[bytes]:
    """What one connection sends, piece by piece: one or several requests, some of them whole."""
    data = b"".join(_request(chance) for _ in range(chance.choice((1, 1, 1, 2, 5))))
    if chance.random() < 0.1:
        data = data[: chance.randrange(len(data) + 1)]
    pieces = []
    while data:
        size = chance.choice((1, 7, 100, 1 << 16, 1 << 20))
        pieces.append(data[:size])
        data = data[size:]
        if len(pieces) == 50:  # small ones take long
            return [*pieces, data]
    return pieces


def _request(chance: random.Random) -> bytes:
    path, body = chance.choice(BODIES)
    kind = chance.random()
    if kind < 0.2:
        method = chance.choice(("GET", "HEAD", "PUT", "OPTIONS", "DELETE", "BREW"))
        return _broken(request_bytes(chance.choice(PATHS), b"", method=method), chance, 0.3)
    if kind < 0.7:
        body = _odd(body, chance)
    encoded = json.dumps(body).encode()
    if kind > 0.9:
        encoded = _broken(encoded, chance, 1)
    return _broken(request_bytes(path, encoded), chance, 0.3 if kind > 0.5 else 0)


def _odd(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy with some values exchanged, at any depth, and some fields more."""
    copy = deepcopy(body)
    for _ in range(chance.randrange(1, 4)):
        holder: Any = copy
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys or (holder is copy and chance.random() < 0.4):
                break
            key = chance.choice(keys)
            if not isinstance(holder[key], dict | list) or chance.random() < 0.4:
                holder[key] = deepcopy(chance.choice(ODD))
                break
            holder = holder[key]
        if holder is copy:
            copy[chance.choice(FIELDS)] = deepcopy(chance.choice(ODD))
    return dict(copy)


def _broken(data: bytes, chance: random.Random, share: float) -> bytes:
    """With bytes exchanged, lost, doubled or put in; of a `share` of all."""
    if chance.random() >= share:
        return data
    out = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(4):
            case 0:
                out[at:at] = chance.choice(WORDS)
            case 1:
                del out[at : at + chance.randrange(1, 20)]
            case 2:
                out[at:at] = out[at : at + 40]
            case _ if at < len(out):
                out[at] = chance.randrange(256)
    return bytes(out)
