"""What a caller may ask of sampling, checked the same way for HTTP and gRPC."""

import secrets
from dataclasses import dataclass

from paceline.core.errors import InvalidRequest
from paceline.core.sampling import MAX_STOP_CHARS, LogitsProcessorCall, SamplingParams
from paceline.core.targets import checked_targets
from paceline.gateway.bad_words import check_bad_words
from paceline.gateway.jobs import Urgency
from paceline.gateway.stop_strings import StopAutomaton
from paceline.gateway.tenants import Tenant
from paceline.v1.control_pb2 import ModelInfo


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
    ttft_ms: float | None = None
    itl_ms: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    num_prompt_logprobs: int | None = None
    logits_processors: tuple[LogitsProcessorCall, ...] = ()


def sampling_params(wishes: SamplingWishes, model: ModelInfo) -> SamplingParams:
    """Checked parameters; max_tokens is the whole context if the caller named none. Bad words are
    checked, and added by `Prompts.with_bad_words` once nothing else is wrong."""
    check_bad_words(wishes.bad_words)
    params = _params(wishes, model)
    params.check_ids(model.vocab_size)
    return params


def _params(wishes: SamplingWishes, model: ModelInfo) -> SamplingParams:
    for token_id in wishes.stop_token_ids:
        if not 0 <= token_id < model.vocab_size:
            reason = f"must lie between 0 and {model.vocab_size - 1}"
            raise InvalidRequest("stop_token_ids", token_id, reason)
    max_tokens = model.context_length if wishes.max_tokens is None else wishes.max_tokens
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=wishes.min_tokens or 0,
        temperature=_or(wishes.temperature, 1.0),
        min_p=_or(wishes.min_p, 0.0),
        top_k=_top_k(wishes.top_k, model),
        top_p=_or(wishes.top_p, 1.0),
        typical_p=_or(wishes.typical_p, 1.0),
        seed=_seed(wishes.seed),
        n=1 if wishes.n is None else wishes.n,
        stop_token_ids=wishes.stop_token_ids,
        ignore_eos=wishes.ignore_eos,
        num_logprobs=_count("logprobs", wishes.num_logprobs),
        num_prompt_logprobs=_count("prompt_logprobs", wishes.num_prompt_logprobs),
        repetition_penalty=_or(wishes.repetition_penalty, 1.0),
        presence_penalty=_or(wishes.presence_penalty, 0.0),
        frequency_penalty=_or(wishes.frequency_penalty, 0.0),
        logit_bias=wishes.logit_bias,
        bad_words=wishes.bad_token_ids,
        logits_processors=wishes.logits_processors,
    )


def stop_automata(stop: tuple[str, ...], max_stop_strings: int) -> tuple[StopAutomaton, ...]:
    if len(stop) > max_stop_strings:
        raise InvalidRequest("stop", f"{len(stop)} strings", f"at most {max_stop_strings} strings")
    for text in stop:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            reason = f"a stop string has between 1 and {MAX_STOP_CHARS} characters"
            raise InvalidRequest("stop", text, reason)
    return tuple(StopAutomaton(text) for text in stop)


def check_prompt_logprobs(
    params: SamplingParams,
    num_prompt_tokens: int,
    limit: int,
    *,
    num_copies: int = 1,
    field: str = "prompt_logprobs",
) -> None:
    """An answer holds them all, `num_copies` times: a short list of ids would become megabytes."""
    asked = params.num_prompt_logprobs
    num_values = num_prompt_tokens * (asked + 1) * num_copies
    if asked >= 0 and num_values > limit:
        times = f" and {num_copies} choices" if num_copies > 1 else ""
        reason = (
            f"with {num_prompt_tokens} prompt tokens{times} that is {num_values} values in an "
            f"answer; at most {limit}"
        )
        raise InvalidRequest(field, asked, reason)


def check_logprobs(field: str, params: SamplingParams, num_tokens: int, limit: int) -> None:
    """An answer in one piece holds those of all its `num_tokens` tokens, of all choices."""
    asked = params.num_logprobs
    num_values = num_tokens * (asked + 1)
    if asked >= 0 and num_values > limit:
        reason = (
            f"with {num_tokens} tokens in all choices, as max_tokens allows, that is {num_values} "
            f"values in an answer; at most {limit} without stream"
        )
        raise InvalidRequest(field, asked, reason)


def urgency_of(wishes: SamplingWishes, tenant: Tenant) -> Urgency:
    targets = checked_targets(wishes.ttft_ms, wishes.itl_ms)
    return Urgency(tenant.priority_of(wishes.priority), targets, tenant.weight)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _count(field: str, count: int | None) -> int:
    if count is not None and count < 0:
        raise InvalidRequest(field, count, "must not be negative")
    return -1 if count is None else count


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
