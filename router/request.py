"""A request at the router: its token log, the truth about what its client has seen."""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from paceline.core.errors import InvalidRequest, PacelineError, Unavailable
from paceline.core.keys import HASH_BLOCK_TOKENS, KEY_BYTES, chain_keys
from paceline.core.pooling import Pooling
from paceline.core.sampling import SamplingParams
from paceline.core.targets import LatencyTargets
from paceline.core.tracing import NO_SPAN
from paceline.router.hopes import DOUBT_S
from paceline.router.lineup import Turn
from paceline.rpc import convert
from paceline.rpc.epochs import ATTEMPTS_PER_EPOCH, MAX_EPOCH, MAX_LOST_WORKERS
from paceline.v1 import common_pb2

WorkerLife = tuple[str, str]  # worker id, incarnation
CANCELLED = common_pb2.FINISH_REASON_CANCELLED
PATIENCE_S = 10.0  # after which the first token is due of a request that names no time for it
LEAST_PATIENCE_S = 0.1  # who names less goes before nobody for that
MAX_WEIGHT = 1e6
_check = InvalidRequest.check


class GivenBack(Unavailable):
    """The router leaves: another one can go on with the request, after the tokens so far."""


class Sink(Protocol):
    """Where a request's output goes. `slot` of what it is given is the sink's own. Never blocks."""

    def emit(self, emission: common_pb2.Emission) -> None: ...
    def fail(self, slot: int, error: PacelineError) -> None: ...

    def set_back(self, slot: int, num_failures: int, lost: WorkerLife | None) -> None:
        """An attempt has failed, with a worker that was `lost` or not; another one follows."""


class TokenLog:
    """Of one choice: `tokens[i]` is output token i, as it went to the client."""

    __slots__ = ("finished", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finished = False


class Request:
    """Checked on arrival. Raises InvalidRequest: a peer's message is checked like a caller's."""

    def __init__(
        self, slot: int, message: common_pb2.TokenRequest, sink: Sink, limit_s: float
    ) -> None:
        sampling, pooling = convert.wanted_of(message)
        choices = list(message.choices) or list(range(sampling.n))
        _check_lengths(message, sampling, choices)
        self.slot = slot
        self.message = message
        self.sink = sink
        self.max_tokens = sampling.max_tokens if pooling is None else 0
        self.scores_prompt = sampling.num_prompt_logprobs >= 0 or pooling is Pooling.MEAN
        self.logs = {choice: TokenLog() for choice in choices}
        num_keys = message.num_prompt_tokens // HASH_BLOCK_TOKENS
        self.block_keys = message.block_keys[: num_keys * KEY_BYTES]
        message.ClearField("block_keys")
        self.num_failures_before = message.num_failures  # at other routers
        self.lost_before = [(life.worker_id, life.incarnation) for life in message.lost_workers]
        message.ClearField("lost_workers")
        # Tokens beyond the prompt were emitted before this router knew the request.
        self.num_forced_at_start = len(message.token_ids) - message.num_prompt_tokens
        for log in self.logs.values():
            log.tokens.extend(message.token_ids[message.num_prompt_tokens :])
        del message.token_ids[message.num_prompt_tokens :]
        self.span = NO_SPAN
        self.created_at = asyncio.get_running_loop().time()
        budget_s = message.budget_ms / 1000 if message.budget_ms else limit_s
        self.deadline = self.created_at + min(budget_s, limit_s)
        self.targets = LatencyTargets(message.ttft_ms, message.itl_ms)
        wanted_s = self.targets.ttft_ms / 1000 or PATIENCE_S
        wanted_s = max(wanted_s, LEAST_PATIENCE_S)
        self.due = min(self.created_at + wanted_s, self.deadline)  # its first token
        # The next one's number, of all its parts: never one of an earlier epoch.
        self.next_attempt = message.epoch * ATTEMPTS_PER_EPOCH
        self.placed_at: float | None = None  # for the first time
        self.plan_kind = ""  # of its last attempt: whole or split
        self.first_token_at: float | None = None
        self.second_token_at: float | None = None
        self.last_token_at: float | None = None  # if a time between tokens is hoped for

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def key(self) -> tuple[str, int]:
        """Request id and epoch: parts of one request may come back one by one."""
        return self.message.request_id, self.message.epoch

    @property
    def num_prompt_tokens(self) -> int:
        return self.message.num_prompt_tokens

    @property
    def num_tokens_at_most(self) -> int:
        """Prompt and all output: what a worker that serves it must have room for."""
        return self.num_prompt_tokens + self.max_tokens

    def turn(self, arrival: int) -> Turn:
        message = self.message
        return Turn(
            message.priority,
            message.tenant,
            message.tenant_weight or 1.0,
            self.due,
            arrival,
            self.num_prompt_tokens,
        )

    @property
    def hoped_due(self) -> float:
        """Until when its first token is hoped for: for ever if nothing was said, or it has come."""
        waits = self.targets.ttft_ms > 0 and self.first_token_at is None
        return self.due if waits and not self.num_forced_at_start else float("inf")

    @property
    def hope_doubt_s(self) -> float:
        """Of a prediction of its first token: no more than what is hoped for, or who hopes for what
        nobody can keep would be placed before those who hope for what can be."""
        return min(DOUBT_S, self.targets.ttft_ms / 1000 or DOUBT_S)

    def hopes_kept(self, now: float) -> Iterator[tuple[str, bool]]:
        """At its end, which of its hopes came true; none of what was cut off before that showed,
        or began at another router."""
        first, last = self.first_token_at, self.last_token_at
        if self.targets.ttft_ms and not self.num_forced_at_start:
            due = self.created_at + self.targets.ttft_ms / 1000
            if first is not None or now > due:
                yield "ttft", first is not None and first <= due
        if self.targets.itl_ms and first is not None and last is not None:
            num_new = max(len(log.tokens) for log in self.logs.values()) - self.num_forced_at_start
            if num_new > 1:
                yield "itl", last - first <= (num_new - 1) * self.targets.itl_ms / 1000

    @property
    def had_turn(self) -> bool:
        """Here, or at another router: its client may have tokens."""
        return self.placed_at is not None or self.num_forced_at_start > 0

    @property
    def may_change_revision(self) -> bool:
        """Its client has seen nothing. Vectors of one answer must be of one revision, and a request
        knows only its own input."""
        is_text = self.message.WhichOneof("wanted") == "sampling"
        return is_text and not self.num_forced_at_start and not self.has_output

    def change_revision(self, root: bytes) -> None:
        """Names its blocks anew."""
        self.message.root_key = root
        if self.block_keys:
            self.block_keys = b"".join(chain_keys(root, list(self.message.token_ids)))

    @property
    def has_output(self) -> bool:
        return any(len(log.tokens) > self.num_forced_at_start for log in self.logs.values())

    def unfinished(self, choices: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(choice for choice in choices if not self.logs[choice].finished)

    def remaining_ms(self, now: float) -> int:
        return max(1, round((self.deadline - now) * 1000))

    def for_worker(self, choices: tuple[int, ...], now: float) -> common_pb2.TokenRequest:
        """What a worker gets: prompt and log, forced, for these choices."""
        request = common_pb2.TokenRequest()
        request.CopyFrom(self.message)
        request.token_ids.extend(self.logs[choices[0]].tokens)
        del request.choices[:]
        request.choices.extend(choices)
        request.budget_ms = self.remaining_ms(now)
        return request

    def append(self, log: TokenLog, emission: common_pb2.Emission) -> None:
        """Logs an emission that continues `log` and passes it on."""
        log.tokens.extend(emission.token_ids)
        if emission.finish:
            log.finished = True
        if self.targets.itl_ms:
            self.last_token_at = asyncio.get_running_loop().time()
        if self.second_token_at is None:
            self._note_times(emission, len(log.tokens) - self.num_forced_at_start)
        self.pass_on(emission)

    def note_placed(self) -> None:
        """A worker has been found for it."""
        if self.placed_at is None:
            self.placed_at = asyncio.get_running_loop().time()

    def pass_on(self, emission: common_pb2.Emission) -> None:
        emission.slot = self.slot
        self.sink.emit(emission)

    def _note_times(self, emission: common_pb2.Emission, num_new: int) -> None:
        now = asyncio.get_running_loop().time()
        if emission.embedding:
            self._tell_prompt_times(emission, now)
        elif self.first_token_at is None and num_new >= 1:
            self.first_token_at = now
            self._tell_prompt_times(emission, now)
        if num_new >= 2:
            self.second_token_at = now

    def _tell_prompt_times(self, emission: common_pb2.Emission, now: float) -> None:
        placed_at = now if self.placed_at is None else self.placed_at
        emission.prompt_times.queue_us = round((placed_at - self.created_at) * 1e6)
        emission.prompt_times.prefill_us = round((now - placed_at) * 1e6)


def _check_lengths(
    message: common_pb2.TokenRequest, sampling: SamplingParams, choices: list[int]
) -> None:
    num_prompt = message.num_prompt_tokens
    _check("request_id", message.request_id[:64], 0 < len(message.request_id) <= 128, "has no use")
    weight = message.tenant_weight
    _check("tenant_weight", weight, 0 <= weight <= MAX_WEIGHT, f"at most {MAX_WEIGHT:g}")
    _check("epoch", message.epoch, message.epoch <= MAX_EPOCH, f"at most {MAX_EPOCH}")
    tokens_fit = 0 < num_prompt <= len(message.token_ids)
    _check("num_prompt_tokens", num_prompt, tokens_fit, "must count the prompt in token_ids")
    num_forced = len(message.token_ids) - num_prompt
    reason = f"holds {num_forced} output tokens already, max_tokens is {sampling.max_tokens}"
    _check("token_ids", len(message.token_ids), num_forced < sampling.max_tokens, reason)
    num_lost = len(message.lost_workers)
    _check("lost_workers", num_lost, num_lost <= MAX_LOST_WORKERS, f"at most {MAX_LOST_WORKERS}")
    keys_fit = len(message.block_keys) % KEY_BYTES == 0
    _check("block_keys", len(message.block_keys), keys_fit, f"{KEY_BYTES} bytes a block")
    distinct = len(set(choices)) == len(choices) and max(choices) < sampling.n
    _check("choices", choices, distinct, f"must be different and below n={sampling.n}")
