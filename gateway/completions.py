"""POST /v1/completions: one or many prompts, as text or token ids, to one job each."""

import dataclasses
from collections.abc import Sequence

import msgspec

from paceline.core.errors import InvalidRequest
from paceline.core.sampling import MAX_CHOICES, SamplingParams
from paceline.gateway.answer import AnswerHead
from paceline.gateway.completion_answer import CompletionAnswer, CompletionView
from paceline.gateway.contents import Content, contents_of
from paceline.gateway.context_room import ContextRoom
from paceline.gateway.jobs import Job, Prompt
from paceline.gateway.logprobs import CompletionLogprobs
from paceline.gateway.openai_types import CompletionRequest
from paceline.gateway.prepared import (
    AnswerOptions,
    Caller,
    PreparedRequest,
    answer_options,
    text_options,
    wishes_of,
)
from paceline.gateway.prompt_logprobs import PromptLogprobsText
from paceline.gateway.sampling_intake import (
    SamplingWishes,
    check_logprobs,
    check_prompt_logprobs,
    sampling_params,
    stop_automata,
    urgency_of,
)
from paceline.gateway.serving import Serving
from paceline.gateway.shown_prompt import Echo, ShownPrompt
from paceline.v1.control_pb2 import ModelInfo

DECODER = msgspec.json.Decoder(CompletionRequest)
DEFAULT_MAX_TOKENS = 16
MAX_ECHO_CHARS = 4 << 20  # in an answer: each choice repeats its prompt


async def prepare_completion(
    serving: Serving, request: CompletionRequest, caller: Caller
) -> PreparedRequest:
    """Raises PacelineError; nothing has been sent to the router then."""
    model = serving.model(request.model)
    options = answer_options(request, caller)
    wishes = _wishes(request)
    params = sampling_params(wishes, model)
    stops = stop_automata(wishes.stop, serving.config.limits.max_stop_strings)
    urgency = urgency_of(wishes, caller.tenant)
    contents = contents_of("prompt", request.prompt, serving.config.limits.max_prompts)
    _check_choices(request, len(contents), params.n)
    room = completion_room(model, wishes.max_tokens)
    owner = caller.tenant.owner(request.cache_salt)
    prompts = await serving.prompts.of_contents(
        contents,
        model,
        room,
        owner.salt,
        adds_special=request.add_special_tokens is not False,
    )
    _check_prompt_logprobs(serving, request, params, prompts)
    params = await serving.prompts.with_bad_words(params, wishes.bad_words, model)
    text = text_options(request)
    jobs = []
    for index, prompt in enumerate(prompts):
        max_tokens = room.max_tokens_after(len(prompt.token_ids))
        fitted = dataclasses.replace(params, max_tokens=max_tokens)
        first_choice = index * params.n
        jobs.append(Job(model, owner, prompt, fitted, stops, urgency, first_choice, text))
    _check_logprobs(serving, request, jobs)
    shown = await _shown_prompts(serving, request, contents, prompts, params.n)
    token_bytes = serving.text.token_bytes if request.logprobs is not None else None
    view = _view(request, params.n, options)
    answer = CompletionAnswer(AnswerHead("cmpl", model.name), shown, token_bytes, view)
    return PreparedRequest(model, jobs, answer, bool(request.stream), caller)


def completion_room(model: ModelInfo, max_tokens: int | None) -> ContextRoom:
    return ContextRoom(model.context_length, "prompt", max_tokens, DEFAULT_MAX_TOKENS)


def _wishes(request: CompletionRequest) -> SamplingWishes:
    """What is sampled: one token where only the prompt is asked for, and best_of choices, with
    the log probabilities by which the best are found."""
    num_logprobs = request.logprobs
    num_choices = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != num_choices:
        num_choices = _checked_best_of(request, num_choices, request.best_of)
        num_logprobs = num_logprobs or 0
    is_only_prompt = bool(request.echo) and request.max_tokens == 0
    wishes = wishes_of(request, 1 if is_only_prompt else request.max_tokens, num_logprobs)
    num_scores = wishes.num_prompt_logprobs
    if request.echo and request.logprobs is not None and num_scores is None:
        num_scores = request.logprobs
    return dataclasses.replace(wishes, n=num_choices, num_prompt_logprobs=num_scores)


def _checked_best_of(request: CompletionRequest, num_shown: int, best_of: int) -> int:
    if request.stream:
        reason = "is not available when stream is true: the best are known at the end"
        raise InvalidRequest("best_of", best_of, reason)
    InvalidRequest.check("n", num_shown, num_shown >= 1, "must be at least 1")
    fits = num_shown <= best_of <= MAX_CHOICES
    reason = f"must lie between n, which is {num_shown}, and {MAX_CHOICES}"
    InvalidRequest.check("best_of", best_of, fits, reason)
    return best_of


def _check_choices(request: CompletionRequest, num_prompts: int, num_choices: int) -> None:
    """Of all prompts together."""
    if num_prompts * num_choices > MAX_CHOICES:
        field = "n" if request.best_of is None else "best_of"
        reason = f"with {num_prompts} prompts there may be {MAX_CHOICES} choices in all"
        raise InvalidRequest(field, num_choices, reason)


def _check_prompt_logprobs(
    serving: Serving, request: CompletionRequest, params: SamplingParams, prompts: Sequence[Prompt]
) -> None:
    field = "prompt_logprobs" if request.prompt_logprobs is not None else "logprobs"
    num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    limit = serving.config.limits.max_prompt_logprobs
    check_prompt_logprobs(params, num_tokens, limit, num_copies=params.n, field=field)


def _check_logprobs(serving: Serving, request: CompletionRequest, jobs: Sequence[Job]) -> None:
    """Of the output; `best_of` asks for some by itself."""
    if not request.stream:
        field = "logprobs" if request.logprobs is not None else "best_of"
        num_tokens = sum(job.params.n * job.params.max_tokens for job in jobs)
        check_logprobs(field, jobs[0].params, num_tokens, serving.config.limits.max_answer_logprobs)


def _view(request: CompletionRequest, num_choices: int, options: AnswerOptions) -> CompletionView:
    return CompletionView(
        num_choices=num_choices,
        num_best=1 if request.n is None else request.n,
        has_output=request.max_tokens != 0,
        has_usage=options.has_usage,
        has_timing=options.has_timing,
    )


async def _shown_prompts(
    serving: Serving,
    request: CompletionRequest,
    contents: Sequence[Content],
    prompts: Sequence[Prompt],
    num_choices: int,
) -> list[ShownPrompt]:
    """`num_choices`: of each prompt."""
    scored = request.prompt_logprobs is not None
    token_bytes = serving.text.token_bytes
    scores = [PromptLogprobsText(token_bytes) if scored else None for _ in prompts]
    if not request.echo:
        return [ShownPrompt(None, own) for own in scores]
    skip_special = text_options(request).skips_special
    texts = await serving.prompts.shown_texts(contents, skip_special=skip_special)
    num_chars = sum(map(len, texts)) * num_choices
    reason = (
        f"with {num_choices} choices each that is {num_chars} characters of prompts in an answer"
    )
    fits = num_chars <= MAX_ECHO_CHARS
    InvalidRequest.check("echo", True, fits, f"{reason}; at most {MAX_ECHO_CHARS}")
    shown = []
    for text, prompt, own in zip(texts, prompts, scores, strict=True):
        echo = Echo(text, request.logprobs or 0)
        if request.logprobs is not None:
            detokenizer = serving.text.detokenizer((), skip_special=skip_special)
            echo.begin(CompletionLogprobs(token_bytes), detokenizer, prompt.token_ids[0])
        shown.append(ShownPrompt(echo, own))
    return shown
