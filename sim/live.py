"""Sends a load to a live deployment at its instants, and notes when answers arrive."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from paceline.core.errors import ConfigError
from paceline.sim.http_stream import BROKEN, Server, events, read_all
from paceline.sim.prompts import Prompts
from paceline.sim.slo import Slo
from paceline.sim.trace import Arrival


@dataclass(frozen=True, slots=True)
class Target:
    server: Server
    model: str
    max_model_len: int | None  # None: the server does not tell
    timeout_s: float


@dataclass(slots=True)
class Answered:
    """What became of a request; times from the instant on at which it was due."""

    arrival: Arrival
    late_s: float = 0.0  # sent: no connection was free, or this process was busy
    ttft_s: float = float("inf")
    total_s: float = float("inf")
    gaps_s: list[float] = field(default_factory=list)  # between pieces of the answer
    num_output_tokens: int = 0
    num_cached: int = 0
    failure: str = "unfinished"  # or a status, a code, what happened; empty: none
    message: str = ""  # of the server, about the failure


async def find_target(server: Server, model: str, timeout_s: float, key_file: str = "") -> Target:
    """Raises ConfigError unless the server is there, lets us in and has the model; empty: its only
    one."""
    try:
        async with asyncio.timeout(min(10.0, timeout_s)), server.exchange("/v1/models") as got:
            status, pieces = got
            listed = await read_all(pieces)
        refused = status in (401, 403)
        ConfigError.check("api_key_file", key_file, not refused, f"the server answers {status}")
        ConfigError.check("url", server.url, status == 200, f"/v1/models answers {status}")
        models = {str(one["id"]): one.get("max_model_len") for one in orjson.loads(listed)["data"]}
    except BROKEN as error:
        reason = str(error) or "no answer in time"
        raise ConfigError("url", server.url, f"cannot be reached: {reason}") from None
    except (KeyError, TypeError):
        raise ConfigError("url", server.url, "its /v1/models is no list of models") from None
    name = next(iter(models)) if not model and len(models) == 1 else model
    ConfigError.check("model", model, name in models, f"served are: {', '.join(models) or 'none'}")
    return Target(server, name, models[name], timeout_s)


def body_of(model: str, arrival: Arrival, token_ids: Sequence[int], slo: Slo) -> bytes:
    """As many tokens as the load says; what is promised is told, as in the simulator."""
    promised = {"ttft_ms": 1000 * slo.ttft_limit_s(arrival), "itl_ms": 1000 * slo.itl_s}
    request = {
        "model": model,
        "prompt": token_ids,
        "max_tokens": arrival.num_output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, value in promised.items() if value},
    }
    return orjson.dumps(request)


async def send(target: Target, body: bytes, answered: Answered, due_s: float) -> None:
    """Fills in `answered`; a failure is noted there, too."""
    answered.late_s = time.perf_counter() - due_s
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            target.server.exchange("/v1/completions", body) as (status, pieces),
        ):
            if status != 200:
                answered.failure = str(status)
                _take_error(answered, orjson.loads(await read_all(pieces)))
                return
            last_s = float("inf")
            async for event in events(pieces):
                now_s = time.perf_counter() - due_s
                if event == b"[DONE]":
                    answered.failure = ""
                    return
                content = orjson.loads(event)
                if not isinstance(content, dict):
                    raise ValueError("an event that is no object")
                if "error" in content:
                    answered.failure = "error"
                    _take_error(answered, content)
                    return
                if _take(answered, content):
                    if answered.ttft_s < now_s:
                        answered.gaps_s.append(now_s - last_s)
                    answered.ttft_s = min(answered.ttft_s, now_s)
                    answered.total_s = last_s = now_s
        answered.failure = "cut off"
    except TimeoutError:
        answered.failure = "timeout"
    except BROKEN as error:
        if answered.failure != "unfinished":
            return  # a status whose body is not read
        is_lost = answered.num_output_tokens or not isinstance(error, OSError)
        answered.failure = "cut off" if is_lost else "no connection"


def _take_error(answered: Answered, content: object) -> None:
    match content:
        case {"error": {"message": str(message), "code": code}}:
            answered.message = message
            if answered.failure == "error" and code:
                answered.failure = str(code)


def _take(answered: Answered, event: dict[str, object]) -> bool:
    """Whether it brought tokens."""
    match event:
        case {"usage": {"completion_tokens": int(tokens), **usage}}:
            answered.num_output_tokens = tokens
            match usage:
                case {"prompt_tokens_details": {"cached_tokens": int(cached)}}:
                    answered.num_cached = cached
            return False
        case {"paceline": {"token_ids": list(token_ids)}}:
            answered.num_output_tokens += len(token_ids)
            return bool(token_ids)
        case {"choices": [{"text": str(text)}, *_]}:
            answered.num_output_tokens += bool(text)
            return bool(text)
    return False


async def drive(
    target: Target,
    prompts: Prompts,
    load: Sequence[Arrival],
    slo: Slo,
    *,
    time_scale: float,
    max_connections: int,
    answers: list[Answered],
) -> None:
    """Requests of `load`, shrunk already, at their instants whatever became of others. `answers`
    grows as they are sent."""
    gate = asyncio.Semaphore(max_connections)

    async def one(body: bytes, answered: Answered, due_s: float) -> None:
        try:
            await send(target, body, answered, due_s)
        finally:
            gate.release()

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number, arrival in enumerate(load):
            body = body_of(target.model, arrival, prompts.token_ids(arrival, number), slo)
            due_s = started_s + (arrival.at_s - load[0].at_s) / time_scale
            await asyncio.sleep(due_s - time.perf_counter())
            await gate.acquire()
            answers.append(Answered(arrival))
            tasks.create_task(one(body, answers[-1], due_s))
