"""From a decoded request to jobs and the shape of the answer: what differs between the APIs."""

from dataclasses import dataclass

from paceline.core.errors import InvalidRequest
from paceline.core.sampling import LogitsProcessorCall
from paceline.gateway.answer import Answer
from paceline.gateway.jobs import Job, TextOptions
from paceline.gateway.openai_types import LogitsProcessorField, SamplingFields
from paceline.gateway.request_log import Origin
from paceline.gateway.sampling_intake import SamplingWishes
from paceline.gateway.tenants import Tenant
from paceline.v1.control_pb2 import ModelInfo


@dataclass(frozen=True, slots=True)
class Caller:
    """What comes with a request beside its body."""

    tenant: Tenant
    origin: Origin
    has_timing: bool = False  # wanted in each frame
    has_statistics: bool = False  # wanted at the end


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """All that is needed to run and answer a request."""

    model: ModelInfo
    jobs: list[Job]
    answer: Answer
    is_stream: bool
    caller: Caller


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What the caller wants to see, beside the text."""

    has_usage: bool
    has_timing: bool


def answer_options(request: SamplingFields, caller: Caller) -> AnswerOptions:
    """Raises InvalidRequest for stream options without a stream, as OpenAI does."""
    if request.stream_options is not None and not request.stream:
        reason = "is only allowed when stream is true"
        raise InvalidRequest("stream_options", "…", reason)
    if request.prompt_logprobs is not None and request.stream:
        reason = "is not available when stream is true"
        raise InvalidRequest("prompt_logprobs", request.prompt_logprobs, reason)
    options = request.stream_options
    return AnswerOptions(bool(options and options.include_usage), caller.has_timing)


def wishes_of(
    request: SamplingFields, max_tokens: int | None, num_logprobs: int | None
) -> SamplingWishes:
    """The shared fields of an OpenAI body in the gateway's words."""
    stop = () if request.stop is None else request.stop
    return SamplingWishes(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        seed=request.seed,
        n=request.n,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        num_logprobs=num_logprobs,
        priority=request.priority,
        ttft_ms=request.ttft_ms,
        itl_ms=request.itl_ms,
        min_p=request.min_p,
        typical_p=request.typical_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple(sorted((request.logit_bias or {}).items())),
        bad_words=tuple(request.bad_words or ()),
        num_prompt_logprobs=request.prompt_logprobs,
        logits_processors=tuple(map(_processor_call, request.logits_processors or ())),
    )


def text_options(request: SamplingFields) -> TextOptions:
    return TextOptions(
        skips_special=request.skip_special_tokens is not False,
        shows_stop=bool(request.include_stop_str_in_output),
    )


def _processor_call(field: str | LogitsProcessorField) -> LogitsProcessorCall:
    if isinstance(field, str):
        return LogitsProcessorCall(field)
    try:
        arguments = bytes(field.arguments).decode()  # raw: the decoder has not looked at its text
    except UnicodeDecodeError:
        reason = "arguments must be valid UTF-8"
        raise InvalidRequest("logits_processors", field.name, reason) from None
    return LogitsProcessorCall(field.name, arguments)
