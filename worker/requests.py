"""Requests as they come from a router: checked here, so that the engine can trust what it gets."""

from collections.abc import Sequence

from paceline.core.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from paceline.core.keys import KEY_BYTES
from paceline.core.sampling import SamplingParams
from paceline.core.targets import LatencyTargets
from paceline.engine.messages import RequestSpec
from paceline.rpc.convert import wanted_of
from paceline.v1 import common_pb2

MAX_ID_CHARS = 256


def to_spec(
    message: common_pb2.TokenRequest, *, model: str, vocab_size: int, context_length: int
) -> RequestSpec:
    """Raises InvalidRequest, ContextLengthExceeded or ModelNotFound."""
    if message.model and message.model != model:
        raise ModelNotFound(f"model {message.model[:MAX_ID_CHARS]!r} is not served here")
    _check(message, "request_id", 0 < len(message.request_id) <= MAX_ID_CHARS)
    _check(message, "root_key", len(message.root_key) == KEY_BYTES)
    token_ids = list(message.token_ids)
    sampling, pooling = wanted_of(message)
    num_at_least = 1 if pooling is None else 0
    _check_tokens(token_ids, message.num_prompt_tokens, vocab_size, context_length - num_at_least)
    num_forced = len(token_ids) - message.num_prompt_tokens
    choices = _checked_choices(message.choices, sampling, num_forced)
    return RequestSpec(
        request_id=message.request_id,
        token_ids=token_ids,
        num_prompt_tokens=message.num_prompt_tokens,
        root_key=message.root_key,
        sampling=sampling,
        choices=choices,
        priority=message.priority,
        pooling=pooling,
        itl_ms=LatencyTargets(itl_ms=message.itl_ms).itl_ms,
    )


def _check(message: common_pb2.TokenRequest, field: str, holds: bool) -> None:
    if not holds:
        raise InvalidRequest(field, getattr(message, field), "has a wrong length")


def _check_tokens(
    token_ids: list[int], num_prompt_tokens: int, vocab_size: int, longest: int
) -> None:
    if not token_ids:
        raise InvalidRequest("token_ids", [], "must not be empty")
    largest = max(token_ids)
    if largest >= vocab_size:
        raise InvalidRequest("token_ids", largest, f"the vocabulary has {vocab_size} tokens")
    if not 1 <= num_prompt_tokens <= len(token_ids):
        reason = f"must lie between 1 and the {len(token_ids)} tokens given"
        raise InvalidRequest("num_prompt_tokens", num_prompt_tokens, reason)
    if len(token_ids) > longest:
        reason = f"at most {longest} tokens fit the context, beside the output's first if one comes"
        raise ContextLengthExceeded("token_ids", len(token_ids), reason)


def _checked_choices(
    choices: Sequence[int], sampling: SamplingParams, num_forced: int
) -> tuple[int, ...]:
    """All of 0..n-1 while nothing was emitted; afterwards the one that is continued."""
    given = tuple(choices) or tuple(range(sampling.n))
    if len(set(given)) != len(given) or max(given) >= sampling.n:
        raise InvalidRequest("choices", given, f"must be distinct and below n={sampling.n}")
    if num_forced and len(given) > 1:
        raise InvalidRequest("choices", given, "only one choice can go on from emitted tokens")
    if num_forced >= sampling.max_tokens:
        reason = f"must be less than max_tokens={sampling.max_tokens}"
        raise InvalidRequest("number of emitted tokens", num_forced, reason)
    return given
