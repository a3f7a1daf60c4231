"""What a caller may ask of sampling, checked the same way for HTTP and gRPC."""

import dataclasses
import secrets
from dataclasses import dataclass

from paceline.core.errors import ContextLengthExceeded, InvalidRequest
from paceline.core.sampling import SamplingParams
from paceline.gateway.stop_strings import StopAutomaton
from paceline.v1.control_pb2 import ModelInfo

MAX_STOP_CHARS = 1024
_INT32 = 2**31


@dataclass(frozen=True, slots=True)
class SamplingWishes:
    """A caller's words; None leaves the choice to the gateway."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None
    priority: int | None = None


def sampling_params(wishes: SamplingWishes, model: ModelInfo) -> SamplingParams:
    """Checked parameters; max_tokens is the whole context if the caller named none."""
    for token_id in wishes.stop_token_ids:
        if not 0 <= token_id < model.vocab_size:
            reason = f"must lie between 0 and {model.vocab_size - 1}"
            raise InvalidRequest("stop_token_ids", token_id, reason)
    if wishes.num_logprobs is not None and wishes.num_logprobs < 0:
        raise InvalidRequest("logprobs", wishes.num_logprobs, "must not be negative")
    max_tokens = model.context_length if wishes.max_tokens is None else wishes.max_tokens
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=wishes.min_tokens or 0,
        temperature=1.0 if wishes.temperature is None else wishes.temperature,
        top_k=_top_k(wishes.top_k, model),
        top_p=1.0 if wishes.top_p is None else wishes.top_p,
        seed=_seed(wishes.seed),
        n=1 if wishes.n is None else wishes.n,
        stop_token_ids=wishes.stop_token_ids,
        ignore_eos=wishes.ignore_eos,
        num_logprobs=-1 if wishes.num_logprobs is None else wishes.num_logprobs,
    )


def fit_context(
    params: SamplingParams,
    num_prompt_tokens: int,
    model: ModelInfo,
    *,
    prompt_field: str,
    default_max_tokens: int | None,
    is_explicit: bool,
) -> SamplingParams:
    """max_tokens against the room that the prompt leaves: refused if asked for, else clipped."""
    room = model.context_length - num_prompt_tokens
    if room < 1:
        reason = f"the prompt leaves no room in the context of {model.context_length} tokens"
        raise ContextLengthExceeded(prompt_field, f"{num_prompt_tokens} tokens", reason)
    if is_explicit and params.max_tokens > room:
        reason = (
            f"with {num_prompt_tokens} prompt tokens that is "
            f"{num_prompt_tokens + params.max_tokens} tokens, more than the context of "
            f"{model.context_length}; at most {room} fit"
        )
        raise ContextLengthExceeded("max_tokens", params.max_tokens, reason)
    if is_explicit:
        return params
    max_tokens = room if default_max_tokens is None else min(room, default_max_tokens)
    return dataclasses.replace(params, max_tokens=max_tokens)


def stop_automata(stop: tuple[str, ...], max_stop_strings: int) -> tuple[StopAutomaton, ...]:
    if len(stop) > max_stop_strings:
        raise InvalidRequest("stop", f"{len(stop)} strings", f"at most {max_stop_strings} strings")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            reason = f"a stop string has between 1 and {MAX_STOP_CHARS} characters"
            raise InvalidRequest("stop", text, reason)
    return tuple(StopAutomaton(text) for text in stop)


def checked_priority(priority: int | None) -> int:
    value = priority or 0
    if not -_INT32 <= value < _INT32:
        raise InvalidRequest("priority", value, "must fit in 32 bits, signed")
    return value


def _top_k(top_k: int | None, model: ModelInfo) -> int:
    """vLLM writes "all" as -1; more than the vocabulary is all, too."""
    if top_k is None or top_k == -1:
        return 0
    return min(top_k, model.vocab_size)


def _seed(seed: int | None) -> int:
    """OpenAI's seeds are signed, ours are not: two's complement. None draws one."""
    if seed is None:
        return secrets.randbits(64)
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequest("seed", seed, "must fit in 64 bits")
    return seed % 2**64
